"""The input gradient of the implicit ascent through a 2:4 mask, on GPUs with semi-structured sparsity.

    dX = dY · (W ⊙ m),   W of shape (out, in), two of every four entries along `out` kept; 1:2 is also 2:4

torch packs a matrix along its rows, so (W ⊙ m)ᵀ is packed, and F.linear(dY, packed) = dY · packedᵀ is the product.
Packing is repeated in each ascent, because the weights have changed. Only products in 16 bits use it: in float32, torch
keeps one of every two entries and would silently drop others. Not yet run on a GPU; without one, the masked dense
product is used.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.sparse.semi_structured import SparseSemiStructuredTensorCUSPARSELT as CuSparseLt

from sparsesam.masks.packed import PackedMask


def can_pack(dy: Tensor, weight: Tensor, mask: PackedMask) -> bool:
    """Whether mask, dtypes and shapes are those that cuSPARSELt multiplies; the packed matrix has shape (in, out)."""
    if weight.dim() != 2 or dy.dtype != weight.dtype or dy.dtype not in (torch.float16, torch.bfloat16):
        return False
    sizes = CuSparseLt._DTYPE_SHAPE_CONSTRAINTS[weight.dtype]
    outputs, inputs = weight.shape
    rows = dy.numel() // dy.shape[-1]
    wanted = ((inputs, sizes.sparse_min_rows), (outputs, sizes.sparse_min_cols), (rows, sizes.dense_min_rows))
    return all(size % multiple == 0 for size, multiple in wanted) and mask.is_two_of_four


def to_pack(weight: Tensor, mask: PackedMask) -> Tensor:
    """(W ⊙ m)ᵀ, contiguous."""
    return (weight * mask.unpack(weight.device)).t().contiguous()


def input_gradient(dy: Tensor, weight: Tensor, mask: PackedMask) -> Tensor:
    """dY · (W ⊙ m), dY (…, out) to dX (…, in); by a sparse kernel if there is one, otherwise masked and dense."""
    has_kernel = weight.is_cuda and torch.backends.cusparselt.is_available()
    if not has_kernel or torch.cuda.get_device_capability(weight.device) < (8, 0) or not can_pack(dy, weight, mask):
        return dy @ (weight * mask.unpack(weight.device)).conj()
    packed = CuSparseLt.from_dense(to_pack(weight, mask))
    return F.linear(dy.flatten(0, -2), packed).view(*dy.shape[:-1], weight.shape[1])
