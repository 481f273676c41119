"""A mask of one tensor: one bit per weight on a CPU, the indices of what is kept on other devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

# A chunk should stay in a CPU's cache.
_CHUNK = 1 << 16


@dataclass(frozen=True)
class KeptIndex:
    """Where a mask is 1, in the form that a step on a device uses without searching or waiting for the host.

    ``values`` are kept rows (int64); kept entries (int32, int64 beyond 2^31); or bits, eight entries per byte. Entries
    are counted in the memory order of ``stride``, the weight's.
    """

    kind: Literal["rows", "entries", "bits"]
    values: Tensor
    stride: tuple[int, ...]


class PackedMask:
    """A boolean mask in d/8 bytes, or in 4 bytes for each kept entry; nothing if all ones or all zeros.

    ``bits`` holds eight weights per byte in row-major order, first weight in the highest bit (numpy's packbits order).
    A mask with an ``index`` holds that instead and computes its bits when asked.
    """

    def __init__(self, shape: torch.Size, count: int, bits: Tensor | None, index: KeptIndex | None = None) -> None:
        self.shape = shape
        self.count = count
        self.index = index
        self._bits = bits
        self._patterns: dict[tuple[int, int], bool] = {}

    @classmethod
    def pack(cls, mask: Tensor) -> PackedMask:
        count = int(mask.count_nonzero())
        if count in (0, mask.numel()):
            return cls(mask.shape, count, None)
        return cls(mask.shape, count, pack_bits(mask.detach().reshape(-1)))

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def is_full(self) -> bool:
        return self.count == self.numel

    @property
    def is_empty(self) -> bool:
        return self.count == 0

    @property
    def bits(self) -> Tensor | None:
        return self._bits if self.index is None else pack_bits(self.unpack().reshape(-1))

    @cached_property
    def rows(self) -> Tensor | None:
        """The indices along dimension 0 that are kept whole, if none is kept in part; None otherwise."""
        if self.index is not None:
            return self.index.values if self.index.kind == "rows" else None
        if self._bits is None or len(self.shape) < 2:
            return None
        by_row = self.unpack().flatten(1)
        some = by_row.any(1)
        return some.nonzero().squeeze(1) if torch.equal(some, by_row.all(1)) else None

    def is_n_of_m(self, n: int, m: int) -> bool:
        """Whether exactly n of every m consecutive entries along dimension 0 of a matrix are kept; looked at once."""
        if (n, m) not in self._patterns:
            self._patterns[n, m] = self._looks_like(n, m)
        return self._patterns[n, m]

    def _looks_like(self, n: int, m: int) -> bool:
        if len(self.shape) != 2 or self.shape[0] % m or m * self.count != n * self.numel:
            return False
        return bool((self.unpack().view(self.shape[0] // m, m, -1).sum(1) == n).all())

    def unpack(self, device: torch.device | None = None) -> Tensor:
        if self.index is not None:
            return _unpack_index(self.index, self.shape).to(device or self.index.values.device)
        if self._bits is None:
            return torch.full(self.shape, self.is_full, dtype=torch.bool, device=device)
        flat = unpack_bits(self._bits)[: self.numel]
        return flat.to(device or self._bits.device).reshape(self.shape)

    def chunks(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield ``(start, stop, positions)``: the kept positions within each chunk, counted from its start."""
        bits = self.bits
        assert bits is not None
        for start in range(0, self.numel, _CHUNK):
            stop = min(start + _CHUNK, self.numel)
            yield start, stop, _positions(bits[start // 8 : (stop + 7) // 8])

    def placed(self, weight: Tensor) -> PackedMask:
        """The same mask on the weight's device, as bits on a CPU and `indexed` on others."""
        if weight.device.type != "cpu" and is_dense(weight):
            return self.indexed(weight)
        bits = self.bits
        return PackedMask(self.shape, self.count, None if bits is None else bits.to(weight.device))

    def indexed(self, weight: Tensor) -> PackedMask:
        """The same mask with an index for this weight, which must be dense in memory.

        Kept rows where nothing else is kept, kept entries up to half of the weights, beyond that bits: index and saved
        values take at most 4 bytes per weight, or one bit more than that.
        """
        stride = weight.stride()
        if self.is_full or self.is_empty or (self.index is not None and self.index.stride == stride):
            return self
        if self.rows is not None:
            index = KeptIndex("rows", self.rows.to(weight.device), stride)
        else:
            mask = in_memory_order(self.unpack(), stride)
            if 2 * self.count <= self.numel:
                kept = mask.nonzero().squeeze(1).to(torch.int32 if self.numel < 2**31 else torch.int64)
                index = KeptIndex("entries", kept.to(weight.device), stride)
            else:
                index = KeptIndex("bits", pack_bits(mask).to(weight.device), stride)
        return PackedMask(self.shape, self.count, None, index)


def pack_bits(flat: Tensor) -> Tensor:
    """Eight booleans per byte, the first in the highest bit; the last byte is filled up with zeros."""
    if flat.device.type == "cpu":
        return torch.from_numpy(np.packbits(flat.numpy()))
    return _pack_bits_on_device(flat)


def _pack_bits_on_device(flat: Tensor) -> Tensor:
    padded = flat.new_zeros((flat.numel() + 7) // 8 * 8)
    padded[: flat.numel()] = flat
    return (padded.view(-1, 8) * bit_values(flat.device)).sum(1, dtype=torch.uint8)


def unpack_bits(bits: Tensor) -> Tensor:
    """The inverse of `pack_bits`, with its padding."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bits.numpy()).view(np.bool_))
    return _unpack_bits_on_device(bits)


def _unpack_bits_on_device(bits: Tensor) -> Tensor:
    return (bits[:, None] & bit_values(bits.device)).ne(0).reshape(-1)


def bit_values(device: torch.device) -> Tensor:
    """128, 64, …, 1, made on the device."""
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=device)
    return torch.ones_like(places).bitwise_left_shift_(places)


def is_dense(weight: Tensor) -> bool:
    """Whether its entries fill one piece of memory, in whatever order (contiguous, channels last)."""
    reach = sum((size - 1) * step for size, step in zip(weight.shape, weight.stride(), strict=True))
    return 1 + reach == weight.numel()


def in_memory_order(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The entries as a vector, in the order in which a dense tensor of that stride holds them."""
    laid_out = torch.empty_strided(tuple(tensor.shape), stride, dtype=tensor.dtype, device=tensor.device)
    return laid_out.copy_(tensor).as_strided((tensor.numel(),), (1,))


def _unpack_index(index: KeptIndex, shape: torch.Size) -> Tensor:
    if index.kind == "bits":
        return unpack_bits(index.values)[: shape.numel()].as_strided(tuple(shape), index.stride).contiguous()
    is_rows = index.kind == "rows"
    flat = torch.zeros(shape[0] if is_rows else shape.numel(), dtype=torch.bool, device=index.values.device)
    flat.index_fill_(0, index.values.long(), True)
    if is_rows:
        return flat.view(-1, *[1] * (len(shape) - 1)).expand(shape).contiguous()
    return flat.as_strided(tuple(shape), index.stride).contiguous()


def _positions(bits: Tensor) -> Tensor:
    if bits.device.type == "cpu":  # ten times faster than torch.nonzero
        return torch.from_numpy(np.flatnonzero(np.unpackbits(bits.numpy()).view(np.bool_)))
    return unpack_bits(bits).nonzero().squeeze(1)
