import pytest
import torch

from sparsesam.lab.models import wide_resnet
from sparsesam.lab.models.resnet import PreActivationBlock


def test_where_the_shape_stays_the_shortcut_is_the_input():
    block = PreActivationBlock(4, 4, 1).eval()
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(block(x), x)


def test_stages_widen_and_halve():
    model = wide_resnet(16, 2).eval()
    shapes = []
    x = torch.zeros(1, 3, 32, 32)
    for name, module in model.named_children():
        x = module(x)
        if name.startswith("layer"):
            shapes.append(tuple(x.shape[1:]))
            assert len(module) == 2
    assert shapes == [(32, 32, 32), (64, 16, 16), (128, 8, 8)]


def test_refuses_a_depth_that_no_blocks_make():
    with pytest.raises(ValueError, match=r"depth must be 6 n \+ 4 .* got 20"):
        wide_resnet(20, 2)
