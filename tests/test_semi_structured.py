"""2:4 on GPUs: what is packed, and the dense reference, on a CPU. The product has not been run on a GPU yet."""

from __future__ import annotations

import pytest
import torch
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

import sparsesam
from sparsesam.lab.models.vit import VisionTransformer
from sparsesam.masks.packed import PackedMask
from sparsesam.semi_structured import can_pack, input_gradient, to_pack


def masked(n, m, rows=128, columns=64, axis="output"):
    scores = torch.rand(rows, columns, generator=torch.Generator().manual_seed(0))
    return PackedMask.pack(sparsesam.NM(n, m, axis).select({"w": scores})["w"])


def packs(mask, dtype=torch.bfloat16, rows=8, shape=(128, 64)):
    return can_pack(torch.zeros(rows, shape[0], dtype=dtype), torch.zeros(shape, dtype=dtype), mask)


@pytest.mark.parametrize(
    ("n", "m", "options", "expected"),
    [
        *((2, 4, {"dtype": dtype}, True) for dtype in (torch.float16, torch.bfloat16)),
        (1, 2, {}, True),  # also two of every four
        (1, 4, {}, False),
        (4, 4, {}, False),
        *((2, 4, {"dtype": dtype}, False) for dtype in (torch.float32, torch.float64)),
        (2, 4, {"rows": 3}, False),
        (2, 4, {"shape": (100, 64)}, False),
    ],
    ids=str,
)
def test_product_is_sparse_by_mask_dtype_and_shape(n, m, options, expected):
    assert packs(masked(n, m, *options.get("shape", (128, 64))), **options) is expected


def test_product_is_not_sparse_with_groups_along_the_inputs():
    assert not packs(masked(2, 4, axis="input"))


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 2)])
def test_packing_is_lossless(n, m):
    """With torch's own packing, which also runs on a CPU."""
    weight, mask = torch.randn(128, 64).bfloat16(), masked(n, m)
    dense = to_pack(weight, mask)
    assert torch.equal(dense, (weight * mask.unpack()).t())
    packed, meta = sparse_semi_structured_from_dense_cutlass(dense)
    assert torch.equal(packed.reshape(-1), dense[dense != 0])
    assert torch.equal(sparse_semi_structured_to_dense_cutlass(packed, meta), dense)


@pytest.mark.parametrize("shape", [(8, 128), (2, 4, 128)])
def test_product_without_gpu_is_masked_and_dense(shape):
    mask, weight, dy = masked(2, 4), torch.randn(128, 64), torch.randn(shape)
    torch.testing.assert_close(input_gradient(dy, weight, mask), dy @ (weight * mask.unpack()))
    weight.mul_(2)  # nothing is cached between calls
    torch.testing.assert_close(input_gradient(dy, weight, mask), dy @ (weight * mask.unpack()))


def test_every_inner_layer_of_papers_vit_uses_sparse_product():
    """All but the classifier and what sees the pixels."""
    model = VisionTransformer(10, 3, 32, patch_size=4, dim=384, depth=1, heads=6, mlp_ratio=4.0)
    inner = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and min(m.weight.shape) >= 384]
    assert len(inner) >= 3
    for layer in inner:
        shape = tuple(layer.weight.shape)
        assert packs(masked(2, 4, *shape), rows=64 * 16, shape=shape)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with sparse tensor cores")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sparse_product_equals_masked_dense_product(dtype):
    weight, dy = torch.randn(128, 64).to(dtype).cuda(), torch.randn(64, 128).to(dtype).cuda()
    mask = masked(2, 4).placed(weight.device)
    found = input_gradient(dy, weight, mask)
    torch.testing.assert_close(found, dy @ (weight * mask.unpack()), rtol=1e-2, atol=1e-2)
