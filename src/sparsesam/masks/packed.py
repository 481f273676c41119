"""A mask of one tensor, held in one bit per weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

# On a CPU a chunk should stay in cache; an accelerator wants few, large launches.
_CPU_CHUNK = 1 << 16
_DEVICE_CHUNK = 1 << 24


@dataclass(frozen=True)
class PackedMask:
    """A boolean mask in d/8 bytes; masks that are all ones or all zeros take no memory.

    ``bits`` holds eight weights per byte, first weight in the highest bit (numpy's packbits order).
    """

    shape: torch.Size
    count: int
    bits: Tensor | None

    @classmethod
    def pack(cls, mask: Tensor) -> PackedMask:
        count = int(mask.count_nonzero())
        if count in (0, mask.numel()):
            return cls(mask.shape, count, None)
        packed = np.packbits(mask.detach().reshape(-1).cpu().numpy())
        return cls(mask.shape, count, torch.from_numpy(packed).to(mask.device))

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def is_full(self) -> bool:
        return self.count == self.numel

    @property
    def is_empty(self) -> bool:
        return self.count == 0

    @cached_property
    def rows(self) -> Tensor | None:
        """The indices along dimension 0 that are kept whole, if none is kept in part; None otherwise."""
        if self.bits is None or len(self.shape) < 2:
            return None
        by_row = self.unpack().flatten(1)
        some = by_row.any(1)
        return some.nonzero().squeeze(1) if torch.equal(some, by_row.all(1)) else None

    def unpack(self, device: torch.device | None = None) -> Tensor:
        if self.bits is None:
            return torch.full(self.shape, self.is_full, dtype=torch.bool, device=device)
        flat = _unpack_bits(self.bits)[: self.numel]
        return flat.to(device or self.bits.device).reshape(self.shape)

    def chunks(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield ``(start, stop, positions)``: the kept positions within each chunk, counted from its start."""
        assert self.bits is not None
        chunk = _CPU_CHUNK if self.bits.device.type == "cpu" else _DEVICE_CHUNK
        for start in range(0, self.numel, chunk):
            stop = min(start + chunk, self.numel)
            yield start, stop, _positions(self.bits[start // 8 : (stop + 7) // 8])

    def to(self, device: torch.device) -> PackedMask:
        return PackedMask(self.shape, self.count, None if self.bits is None else self.bits.to(device))

    def state_dict(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "count": self.count, "bits": self.bits}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> PackedMask:
        return cls(torch.Size(state["shape"]), int(state["count"]), state["bits"])


def _unpack_bits(bits: Tensor) -> Tensor:
    if bits.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bits.numpy()).view(np.bool_))
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=bits.device)
    return (bits[:, None] & weights).ne(0).reshape(-1)


def _positions(bits: Tensor) -> Tensor:
    if bits.device.type == "cpu":  # ten times faster than torch.nonzero
        return torch.from_numpy(np.flatnonzero(np.unpackbits(bits.numpy()).view(np.bool_)))
    return _unpack_bits(bits).nonzero().squeeze(1)
