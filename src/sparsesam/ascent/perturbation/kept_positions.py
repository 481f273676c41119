"""Where the kept entries of several weights are, once these are joined into one vector."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsesam.masks.packed import PackedMask, in_memory_order, is_dense, pack_bits, unpack_bits


def joined(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
    """All entries in one new vector, each tensor in the memory order of the one it is like."""
    return torch.cat([flat(one, other.stride()) for one, other in zip(tensors, like, strict=True)])


def flat(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The entries as a vector in the memory order of that stride, a view where they are so already."""
    if tensor.stride() == stride and is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return in_memory_order(tensor, stride)


class KeptPositions:
    """Where masks are 1 in the vector that `joined` makes of their weights, found without waiting for the device.

    Held as positions of 4 bytes where these, the saved entries and the mask itself take at most 4 bytes per weight,
    else as bits.
    """

    def __init__(self, masks: Sequence[PackedMask], weights: Sequence[Tensor]) -> None:
        self.lengths = [mask.count for mask in masks]
        self._masks, self._strides = list(masks), [weight.stride() for weight in weights]
        kept = [mask.unpack(weight.device) for mask, weight in zip(masks, weights, strict=True)]
        vector = joined(kept, weights)
        self._size, self._count = vector.numel(), sum(self.lengths)
        few = 8 * self._count + self._size / 8 <= 4 * self._size
        found = positions_of(vector, self._count) if few else None
        self._positions = found if found is None or self._size >= 2**31 else found.int()
        self._bits = None if few else pack_bits(vector)

    def fits(self, masks: Sequence[PackedMask], weights: Sequence[Tensor]) -> bool:
        """Whether it was made of these."""
        same = len(masks) == len(self._masks) and all(map(operator.is_, masks, self._masks))
        return same and self._strides == [weight.stride() for weight in weights]

    def find(self) -> Tensor:
        if self._positions is not None:
            return self._positions
        assert self._bits is not None
        return positions_of(unpack_bits(self._bits)[: self._size], self._count)


def positions_of(kept: Tensor, count: int) -> Tensor:
    """nonzero() of a vector with ``count`` ones; the device need not tell the host how many there are."""
    if kept.device.type in ("cpu", "cuda", "xpu", "meta") and torch.__version__ >= "2.7":
        return torch.nonzero_static(kept, size=count).squeeze(1)
    return positions_by_sums(kept, count)


def positions_by_sums(kept: Tensor, count: int) -> Tensor:
    """The same where torch has no nonzero_static: every one has its place, all zeros share the first."""
    places = kept.cumsum(0).masked_fill_(~kept, 0)
    found = places.new_empty(count + 1)
    return found.scatter_(0, places, torch.arange(len(kept), device=kept.device))[1:]
