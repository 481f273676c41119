"""The implicit ascent's input gradient through a 2:4 mask, on GPUs that multiply by 2:4 sparse matrices.

    dX = dY · (W ⊙ m),   W of shape (out, in), two of every four entries along `out` kept

torch packs a matrix that is 2:4 along its rows, so (W ⊙ m)ᵀ is packed, anew in each ascent because the weights
have moved, and F.linear(dY, packed) = dY · packedᵀ is the product. Not yet run on a GPU: `can_pack` is False
without one, and the masked dense product is the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsesam.masks.packed import PackedMask

#: Sparse tensor cores came with compute capability 8.0 (Ampere).
_FIRST_CAPABILITY = (8, 0)
_DTYPES = (torch.float16, torch.bfloat16)
#: Both sides of the packed matrix must be multiples of this for every dtype that we pack.
_MULTIPLE = 64


def can_pack(dy: Tensor, weight: Tensor, mask: PackedMask) -> bool:
    """Whether device, dtype, shape and mask allow the sparse product."""
    return (
        weight.device.type == "cuda"
        and torch.cuda.get_device_capability(weight.device) >= _FIRST_CAPABILITY
        and fits(dy, weight, mask)
    )


def fits(dy: Tensor, weight: Tensor, mask: PackedMask) -> bool:
    """The guards that do not depend on the machine."""
    rows = dy.numel() // dy.shape[-1]
    return (
        weight.dim() == 2
        and dy.dtype in _DTYPES
        and all(size % _MULTIPLE == 0 for size in weight.shape)
        and rows % 8 == 0
        and 2 * mask.count == mask.numel
        and is_two_of_four(mask.unpack())
    )


def is_two_of_four(mask: Tensor) -> bool:
    """Whether exactly two of every four consecutive entries along the output dimension are kept."""
    if mask.dim() != 2 or mask.shape[0] % 4:
        return False
    return bool((mask.view(mask.shape[0] // 4, 4, -1).sum(1) == 2).all())


def sparse_input_gradient(dy: Tensor, weight: Tensor, mask: PackedMask) -> Tensor:
    """dY · (W ⊙ m) by the sparse product; dY (…, out) to dX (…, in)."""
    masked = (weight * mask.unpack(weight.device)).t().contiguous()
    packed = torch.sparse.to_sparse_semi_structured(masked)
    return F.linear(dy.flatten(0, -2), packed).view(*dy.shape[:-1], weight.shape[1])


def input_gradient(dy: Tensor, weight: Tensor, mask: PackedMask) -> Tensor:
    """dY · (W ⊙ m), sparse where that can be, otherwise masked and dense."""
    if can_pack(dy, weight, mask):
        return sparse_input_gradient(dy, weight, mask)
    return dy @ (weight * mask.unpack(weight.device)).conj()
