"""The k-th largest of many numbers, held by one process or spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards

_DIGIT = 11


@dataclass(frozen=True)
class Threshold:
    """The k largest are all numbers above ``value``, and ``wanted`` of the ``equal`` ones that are equal to it."""

    value: float
    wanted: int
    equal: int


def kth_largest(values: Tensor, k: int, shards: Shards) -> Threshold:
    """Of all entries of this vector and those of the other ranks, of which there are at least k >= 1.

    ``values`` are float32, float64, or int64 not below zero; their order may change.
    """
    if not shards.is_whole:
        return _by_digits(values, k, shards)
    if values.device.type == "cpu":  # numpy is several times faster than torch.topk
        place = len(values) - k
        values.numpy().partition(place)
        value = values[place].item()
        at_most, largest = values[:place], values[place:]
        wanted = k - int((largest > value).count_nonzero())
        return Threshold(value, wanted, wanted + int((at_most == value).count_nonzero()))
    value = by_topk(values, k)
    above, equal = (int(found.count_nonzero()) for found in (values > value, values == value))
    return Threshold(value, k - above, equal)


def by_topk(values: Tensor, k: int) -> float:
    """On a device: torch.topk from the nearer of the two ends."""
    if 2 * k <= len(values):
        return values.topk(k, sorted=False).values.min().item()
    return values.topk(len(values) - k + 1, largest=False, sorted=False).values.max().item()


def _by_digits(values: Tensor, k: int, shards: Shards) -> Threshold:
    """From a few histograms of 2048 counts.

    Each round looks at eleven more bits: ranks add up how many of their keys have each value of them, and continue with
    the value that contains the k-th largest. Rounds and their 16 kB depend on the width of a number alone.
    """
    bits = 8 * values.element_size()
    integers = torch.int32 if bits == 32 else torch.int64
    # Unsigned integers in the order of the numbers, of which 64 bits are held in an int64; -0.0 + 0 is 0.0.
    pattern = (values + 0).view(integers).long()
    keys = torch.where(pattern < 0, ~pattern, pattern + (2**31 if bits == 32 else -(2**63)))
    key, wanted, equal = 0, k, 0
    for shift in reversed(range(0, bits, _DIGIT)):
        digits = (keys >> shift) & (2 ** min(_DIGIT, bits - shift) - 1)
        counts = shards.sum(torch.bincount(digits, minlength=2**_DIGIT).cpu())
        from_top = counts.flip(0).cumsum(0)
        place = int(torch.searchsorted(from_top, wanted))
        digit = 2**_DIGIT - 1 - place
        equal = int(counts[digit])
        wanted -= int(from_top[place]) - equal
        key |= digit << shift
        keys = keys[digits == digit]
    half = 2 ** (bits - 1)
    found = torch.tensor(key - half if key >= half else ~key, dtype=integers).view(values.dtype)
    return Threshold(found.item(), wanted, equal)
