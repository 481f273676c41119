import torch

from sparsesam.lab.models import resnet18
from sparsesam.lab.models.resnet import PreActivationBlock


def test_stem_keeps_resolution_of_small_images_only():
    with torch.device("meta"):
        assert resnet18()[:3](torch.empty(1, 3, 32, 32)).shape == (1, 64, 32, 32)
        assert resnet18(image_size=224)[:4](torch.empty(1, 3, 224, 224)).shape == (1, 64, 56, 56)


def test_submodules_have_usual_names_and_convolutions_he_initialization():
    torch.manual_seed(0)
    model = resnet18()
    parts = {name.partition(".")[0] for name, _ in model.named_parameters()}
    assert parts == {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"}
    weight = model.layer4[1].conv2.weight
    assert abs(weight.std().item() / (2 / (512 * 9)) ** 0.5 - 1) < 0.01


def test_shortcut_is_input_where_shape_stays():
    block = PreActivationBlock(4, 4, 1).eval()
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(block(x), x)
