import pytest
import torch
from torch import nn

from sparsesam.lab.models import VisionTransformer, build_model
from sparsesam.lab.models.vit import Attention


def test_attention_is_softmax_of_scaled_products():
    torch.manual_seed(0)
    attention, x = Attention(6, heads=2).double(), torch.randn(3, 5, 6, dtype=torch.float64)
    query, key, value = attention.qkv(x).split(6, dim=-1)
    heads = []
    for part in (slice(0, 3), slice(3, 6)):
        weights = (query[..., part] @ key[..., part].transpose(1, 2) / 3**0.5).softmax(-1)
        heads.append(weights @ value[..., part])
    assert torch.allclose(attention(x), attention.proj(torch.cat(heads, dim=-1)))


def test_every_matrix_belongs_to_plain_layer():
    modules = build_model("vit-tiny-small").modules()
    owners = {type(module).__name__ for module in modules for _ in module.parameters(recurse=False)}
    assert owners == {"Conv2d", "Linear", "LayerNorm", "VisionTransformer"}


def test_order_of_patches_matters_only_through_positions():
    torch.manual_seed(0)
    model = VisionTransformer(4, 1, 8, patch_size=4, dim=12, depth=2, heads=3).eval()
    images = torch.randn(2, 1, 8, 8)
    swapped = torch.cat([images[..., 4:], images[..., :4]], dim=-1)
    assert not torch.allclose(model(images), model(swapped), atol=1e-6)
    nn.init.zeros_(model.positions)
    assert torch.allclose(model(images), model(swapped), atol=1e-6)


def test_patches_must_tile_image():
    with pytest.raises(ValueError, match="image_size must be a multiple of the patch size 16, got 40"):
        build_model("vit-b-16", image_size=40)


def test_head_can_use_mean_over_patches():
    torch.manual_seed(0)
    model = VisionTransformer(4, 1, 8, patch_size=4, dim=12, depth=1, heads=3, pool="mean", projects=False).eval()
    images = torch.randn(2, 1, 8, 8)
    tokens = model.patches(images).flatten(2).transpose(1, 2)
    assert tokens.shape == (2, 4, 12)
    assert torch.equal(model(images), model.head(model.norm(model.blocks(tokens + model.positions)).mean(1)))
