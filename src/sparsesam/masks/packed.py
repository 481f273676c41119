"""A mask of one tensor, stored as one bit per weight, and the positions of the entries that it keeps."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor


class PackedMask:
    """A bool mask in d/8 bytes; without storage if it is all ones or all zeros.

    ``bits`` holds eight weights per byte in row-major order, first weight in the highest bit (numpy's packbits order).
    """

    def __init__(self, shape: torch.Size, count: int, bits: Tensor | None) -> None:
        self.shape, self.count, self.bits = shape, count, bits
        self.is_full, self.is_empty = count == shape.numel(), count == 0

    @classmethod
    def pack(cls, mask: Tensor) -> PackedMask:
        count = int(mask.count_nonzero())
        if count in (0, mask.numel()):
            return cls(mask.shape, count, None)
        bits = torch.from_numpy(np.packbits(mask.detach().reshape(-1).cpu().numpy()))
        return cls(mask.shape, count, bits.to(mask.device))

    @cached_property
    def rows(self) -> Tensor | None:
        """The kept indices along dimension 0, if the mask consists of whole rows; None otherwise."""
        if self.bits is None or len(self.shape) < 2:
            return None
        by_row = self.unpack().flatten(1)
        some = by_row.any(1)
        return some.nonzero().squeeze(1) if torch.equal(some, by_row.all(1)) else None

    @cached_property
    def is_two_of_four(self) -> bool:
        """Whether exactly two of every four consecutive entries along dimension 0 of a matrix are kept."""
        if len(self.shape) != 2 or self.shape[0] % 4 or 2 * self.count != self.shape.numel():
            return False
        return bool((self.unpack().view(self.shape[0] // 4, 4, -1).sum(1) == 2).all())

    def unpack(self, device: torch.device | None = None) -> Tensor:
        if self.bits is None:
            return torch.full(self.shape, self.is_full, dtype=torch.bool, device=device)
        flat = unpack_bits(self.bits)[: self.shape.numel()]
        return flat.to(device or self.bits.device).reshape(self.shape)

    def placed(self, device: torch.device) -> PackedMask:
        """Returns the mask on the device. Except on a CPU, its rows are computed now, so that no step has to."""
        if self.bits is None:
            return self
        placed = PackedMask(self.shape, self.count, self.bits.to(device))
        if device.type != "cpu":
            placed.rows = None if self.rows is None else self.rows.to(device)
        return placed


def unpack_bits(bits: Tensor) -> Tensor:
    """Returns eight bools per byte, the first from the highest bit; the last byte is padded with zeros."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bits.numpy()).view(np.bool_))
    return unpack_bits_on_device(bits)


def unpack_bits_on_device(bits: Tensor) -> Tensor:
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)
    values = torch.ones_like(places).bitwise_left_shift_(places)  # 128, 64, …, 1, without a copy from the host
    return (bits[:, None] & values).ne(0).reshape(-1)


def positions_of(bits: Tensor, count: int = 0) -> Tensor:
    """Returns the positions of set bits; their number ``count`` saves a synchronization with a device."""
    kept = unpack_bits(bits)
    if bits.device.type == "cpu":  # ten times faster than torch.nonzero
        return torch.from_numpy(np.flatnonzero(kept.numpy()))
    if bits.device.type in ("cuda", "xpu", "meta") and torch.__version__ >= "2.7":
        return torch.nonzero_static(kept, size=count).squeeze(1)
    return positions_by_sums(kept, count)


def positions_by_sums(kept: Tensor, count: int) -> Tensor:
    """Replaces nonzero_static where torch lacks it; all zeros are written to a first place, which is dropped."""
    places = kept.cumsum(0).masked_fill_(~kept, 0)
    found = places.new_empty(count + 1)
    return found.scatter_(0, places, torch.arange(len(kept), device=kept.device))[1:]
