"""The input gradient of the implicit ascent through an N:M mask, on GPUs with semi-structured sparsity.

    dX = dY · (W ⊙ m),   W of shape (out, in), two of every four entries along `out` kept (float32: one of every two)

torch packs a matrix along its rows, so (W ⊙ m)ᵀ is packed, and F.linear(dY, packed) = dY · packedᵀ is the product.
Packing is repeated in each ascent, because the weights have changed. What torch's backends support:

    cuSPARSELt   float16, bfloat16    2:4    compute capability 8.0 or higher
    CUTLASS      float16, bfloat16    2:4    compute capability 8.x
                 float32, as TF32     1:2    compute capability 8.x, where float32 products may use TF32

A 2:4 mask in float32 must not be packed: CUTLASS would silently keep one of every two entries and drop the rest. A 1:2
mask is also a 2:4 mask. Not yet run on a GPU; without one, the masked dense product is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.sparse import SparseSemiStructuredTensor
from torch.sparse.semi_structured import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS

from sparsesam.masks.packed import PackedMask

Backend = type[SparseSemiStructuredTensor]


@dataclass(frozen=True)
class Hardware:
    """Properties of the GPU that determine the backend."""

    capability: tuple[int, int]
    has_cusparselt: bool
    allows_tf32: bool

    @classmethod
    def of(cls, device: torch.device) -> Hardware | None:
        """Returns the properties of a CUDA device; None for other devices."""
        if device.type != "cuda":
            return None
        allows_tf32 = torch.get_float32_matmul_precision() != "highest"
        return cls(torch.cuda.get_device_capability(device), torch.backends.cusparselt.is_available(), allows_tf32)


def choose_backend(dy: Tensor, weight: Tensor, mask: PackedMask, hardware: Hardware | None) -> Backend | None:
    """Returns a backend that can compute the product; None: none can."""
    if hardware is None or weight.dim() != 2 or dy.dtype != weight.dtype:
        return None
    by_half = dy.dtype in (torch.float16, torch.bfloat16) and mask.is_n_of_m(2, 4)
    by_tf32 = dy.dtype == torch.float32 and mask.is_n_of_m(1, 2) and hardware.allows_tf32
    backend: Backend
    if by_half and hardware.has_cusparselt and hardware.capability >= (8, 0):
        backend = SparseSemiStructuredTensorCUSPARSELT
    elif (by_half or by_tf32) and hardware.capability[0] == 8:
        backend = SparseSemiStructuredTensorCUTLASS
    else:
        return None
    return backend if _fits(dy, weight, backend) else None


def _fits(dy: Tensor, weight: Tensor, backend: Backend) -> bool:
    """Whether the shapes are multiples of what torch requires; the packed matrix has shape (in, out)."""
    sizes = backend._DTYPE_SHAPE_CONSTRAINTS[weight.dtype]
    outputs, inputs = weight.shape
    rows = dy.numel() // dy.shape[-1]
    wanted = ((inputs, sizes.sparse_min_rows), (outputs, sizes.sparse_min_cols), (rows, sizes.dense_min_rows))
    return all(size % multiple == 0 for size, multiple in wanted)


def to_pack(weight: Tensor, mask: PackedMask) -> Tensor:
    """(W ⊙ m)ᵀ, contiguous."""
    return (weight * mask.unpack(weight.device)).t().contiguous()


def input_gradient(dy: Tensor, weight: Tensor, mask: PackedMask) -> Tensor:
    """dY · (W ⊙ m), dY (…, out) to dX (…, in); by a sparse kernel if there is one, otherwise masked and dense."""
    backend = choose_backend(dy, weight, mask, Hardware.of(weight.device))
    if backend is None:
        return dy @ (weight * mask.unpack(weight.device)).conj()
    packed = backend.from_dense(to_pack(weight, mask))
    return F.linear(dy.flatten(0, -2), packed).view(*dy.shape[:-1], weight.shape[1])
