"""The k-th largest of integers that are spread over ranks, from a few histograms of 2048 counts.

Each round looks at eleven more bits: ranks add up how many of their keys have each value of them, and go on with the
value in which the k-th largest lies. Rounds and their 16 kB depend on the width of a key alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards

_DIGIT = 11


@dataclass(frozen=True)
class Threshold:
    """``above`` are the keys larger than ``key``; ``wanted`` of the ``equal`` ones complete the k largest."""

    key: int
    wanted: int
    equal: int


def kth_largest(keys: Sequence[Tensor], k: int, bits: int, shards: Shards) -> Threshold:
    """``keys``: what this rank counts, int64 in [0, 2^bits), for 64 bits the pattern of an unsigned number.

    k must be at least 1 and at most the number of all keys.
    """
    key, wanted, equal = 0, k, 0
    left = list(keys)
    for shift in reversed(range(0, bits, _DIGIT)):
        digits = [(part >> shift) & (2 ** min(_DIGIT, bits - shift) - 1) for part in left]
        counts = torch.zeros(2**_DIGIT, dtype=torch.int64)
        for part in digits:
            counts += torch.bincount(part, minlength=2**_DIGIT).cpu()
        counts = shards.sum(counts)
        from_top = counts.flip(0).cumsum(0)
        place = int(torch.searchsorted(from_top, wanted))
        digit = 2**_DIGIT - 1 - place
        equal = int(counts[digit])
        wanted -= int(from_top[place]) - equal
        key |= digit << shift
        left = [part[digit_of == digit] for part, digit_of in zip(left, digits, strict=True)]
    return Threshold(key, wanted, equal)


def ordered_keys(values: Tensor) -> Tensor:
    """Integers in the order of float32 or float64 numbers, as `kth_largest` takes them; -0 is 0."""
    if values.dtype == torch.float64:
        pattern = (values + 0.0).view(torch.int64)
        return torch.where(pattern < 0, ~pattern, pattern ^ -(2**63))
    pattern = (values.float() + 0.0).view(torch.int32).to(torch.int64)
    return torch.where(pattern < 0, ~pattern, pattern + 2**31)


def larger(keys: Tensor, key: int, bits: int) -> Tensor:
    """keys > key, 64 bits compared as unsigned."""
    if bits < 64:
        return keys > key
    flipped = key ^ 2**63
    return (keys ^ -(2**63)) > (flipped - 2**64 if flipped >= 2**63 else flipped)


def equal(keys: Tensor, key: int) -> Tensor:
    return keys == (key - 2**64 if key >= 2**63 else key)
