"""2:4 and 1:2 on GPUs: guards, packing and the dense reference, on a CPU. The product has not been run on a GPU yet."""

from __future__ import annotations

import pytest
import torch
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)
from torch.sparse.semi_structured import SparseSemiStructuredTensorCUSPARSELT as CuSparseLt
from torch.sparse.semi_structured import SparseSemiStructuredTensorCUTLASS as Cutlass

import sparsesam
from sparsesam.lab.models.vit import VisionTransformer
from sparsesam.masks.packed import PackedMask
from sparsesam.semi_structured import Hardware, choose_backend, input_gradient, to_pack

AMPERE = Hardware((8, 0), has_cusparselt=True, allows_tf32=True)
HOPPER = Hardware((9, 0), has_cusparselt=True, allows_tf32=True)


def masked(n, m, rows=128, columns=64):
    scores = torch.rand(rows, columns, generator=torch.Generator().manual_seed(0))
    return PackedMask.pack(sparsesam.NM(n, m).select({"w": scores})["w"])


def chosen(mask, dtype=torch.bfloat16, hardware=AMPERE, rows=8, shape=(128, 64)):
    weight = torch.zeros(shape, dtype=dtype)
    return choose_backend(torch.zeros(rows, shape[0], dtype=dtype), weight, mask, hardware)


@pytest.mark.parametrize(
    ("n", "m", "options", "backend"),
    [
        *((2, 4, {"dtype": dtype}, CuSparseLt) for dtype in (torch.float16, torch.bfloat16)),
        (2, 4, {"hardware": HOPPER}, CuSparseLt),
        (1, 2, {}, CuSparseLt),  # also two of every four
        (1, 4, {}, None),
        (2, 4, {"hardware": Hardware((8, 6), False, True)}, Cutlass),
        (2, 4, {"hardware": Hardware((9, 0), False, True)}, None),
        (1, 2, {"dtype": torch.float32}, Cutlass),
        (2, 4, {"dtype": torch.float32}, None),
        (1, 2, {"dtype": torch.float32, "hardware": HOPPER}, None),
        (1, 2, {"dtype": torch.float32, "hardware": Hardware((8, 0), True, allows_tf32=False)}, None),
        (2, 4, {"hardware": Hardware((7, 5), True, True)}, None),
        (2, 4, {"hardware": Hardware.of(torch.device("cpu"))}, None),
        (2, 4, {"dtype": torch.float64}, None),
        (2, 4, {"rows": 3}, None),
        (2, 4, {"shape": (100, 64)}, None),
        (4, 4, {}, None),
    ],
    ids=str,
)
def test_backend_is_chosen_by_mask_dtype_hardware_and_shape(n, m, options, backend):
    assert chosen(masked(n, m, *options.get("shape", (128, 64))), **options) is backend


@pytest.mark.parametrize(("n", "m", "dtype"), [(2, 4, torch.bfloat16), (1, 2, torch.bfloat16), (1, 2, torch.float32)])
def test_packing_is_lossless(n, m, dtype):
    """With torch's own packing, which also runs on a CPU."""
    weight, mask = torch.randn(128, 64).to(dtype), masked(n, m)
    dense = to_pack(weight, mask)
    assert torch.equal(dense, (weight * mask.unpack()).t())
    packed, meta = sparse_semi_structured_from_dense_cutlass(dense)
    assert torch.equal(packed.reshape(-1), dense[dense != 0])
    # torch unpacks float32 as pairs of halves and rewrites those that look like NaN, here in the last bits.
    torch.testing.assert_close(sparse_semi_structured_to_dense_cutlass(packed, meta), dense, rtol=1e-2, atol=0)


def test_packing_two_of_four_in_float32_loses_weights():
    """Why float32 needs 1:2."""
    dense = to_pack(torch.randn(128, 64), masked(2, 4))
    packed, _ = sparse_semi_structured_from_dense_cutlass(dense)
    assert packed.count_nonzero() < dense.count_nonzero()


@pytest.mark.parametrize("shape", [(8, 128), (2, 4, 128)])
def test_product_without_gpu_is_masked_and_dense(shape):
    mask, weight, dy = masked(2, 4), torch.randn(128, 64), torch.randn(shape)
    torch.testing.assert_close(input_gradient(dy, weight, mask), dy @ (weight * mask.unpack()))
    weight.mul_(2)  # nothing is cached between calls
    torch.testing.assert_close(input_gradient(dy, weight, mask), dy @ (weight * mask.unpack()))


def test_every_linear_layer_of_papers_vit_uses_sparse_product():
    """In bf16 with 2:4, and in float32 with 1:2; all but the classifier and what sees the pixels."""
    model = VisionTransformer(10, 3, 32, patch_size=4, dim=384, depth=1, heads=6, mlp_ratio=4.0)
    inner = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and min(m.weight.shape) >= 384]
    assert len(inner) >= 3
    for layer in inner:
        shape = tuple(layer.weight.shape)
        for dtype, n, m in ((torch.bfloat16, 2, 4), (torch.float32, 1, 2)):
            assert chosen(masked(n, m, *shape), dtype, rows=64 * 16, shape=shape) is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with sparse tensor cores")
@pytest.mark.parametrize(("n", "m", "dtype"), [(2, 4, torch.bfloat16), (2, 4, torch.float16), (1, 2, torch.float32)])
def test_sparse_product_equals_masked_dense_product(n, m, dtype):
    weight, dy = torch.randn(128, 64).to(dtype).cuda(), torch.randn(64, 128).to(dtype).cuda()
    mask = masked(n, m).placed(weight.device)
    found = input_gradient(dy, weight, mask)
    torch.testing.assert_close(found, dy @ (weight * mask.unpack()), rtol=1e-2, atol=1e-2)
