import torch
from torch import nn

from sparsesam.lab.models import build_model


def test_small_images_use_one_linear_layer_and_large_ones_published_head():
    with torch.device("meta"):
        small, large = build_model("vgg11-bn"), build_model("vgg11-bn", 1000, image_size=224)
    assert isinstance(small.classifier, nn.Linear)
    assert [layer.out_features for layer in large.classifier if isinstance(layer, nn.Linear)] == [4096, 4096, 1000]


def test_published_head_is_available_for_small_images():
    with torch.device("meta"):
        model = build_model("vgg11-bn-4096")
        layers = [(layer.in_features, layer.out_features) for layer in model.classifier if isinstance(layer, nn.Linear)]
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 10)
    assert layers == [(512, 4096), (4096, 4096), (4096, 10)]
    assert sum(isinstance(layer, nn.Dropout) for layer in model.classifier) == 2
