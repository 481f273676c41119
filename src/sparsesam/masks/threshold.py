"""The k-th largest of many numbers, held by one process or spread over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards

_DIGIT = 11
_SAMPLE = 1 << 14


@dataclass(frozen=True)
class Threshold:
    """The k largest are all numbers above ``value``, and ``wanted`` of the ``equal`` ones that are equal to it."""

    value: float
    wanted: int
    equal: int


def kth_largest(values: Tensor, k: int, shards: Shards) -> Threshold:
    """Of the vectors ``values`` (float32, float64, or int64 not below zero) of all ranks; 1 <= k <= their length."""
    if not shards.is_whole:
        return _by_digits(values, k, shards)
    return _by_partition(values.numpy(), k) if values.device.type == "cpu" else by_topk(values, k)


def _by_partition(values: np.ndarray, k: int) -> Threshold:
    """np.partition; for long vectors, only of the entries between two quantiles of a sample."""
    if len(values) > 4 * _SAMPLE:
        # The result does not depend on the sample: where it misleads, everything is partitioned.
        sample = np.sort(values[np.random.default_rng(0).integers(len(values), size=_SAMPLE)])
        place, margin = _SAMPLE * (1 - k / len(values)), 2 * math.sqrt(_SAMPLE)
        low, high = sample[max(0, int(place - margin))], sample[min(_SAMPLE - 1, int(place + margin))]
        above = int(np.count_nonzero(values > high))
        near = values[(values >= low) & (values <= high)]
        if above < k <= above + len(near):
            values, k = near, k - above
    value = np.partition(values, len(values) - k)[len(values) - k]
    return Threshold(value.item(), k - int(np.count_nonzero(values > value)), int(np.count_nonzero(values == value)))


def by_topk(values: Tensor, k: int) -> Threshold:
    """On a device: torch.topk from the nearer of the two ends."""
    if 2 * k <= len(values):
        value = values.topk(k, sorted=False).values.min()
    else:
        value = values.topk(len(values) - k + 1, largest=False, sorted=False).values.max()
    return Threshold(value.item(), k - int((values > value).count_nonzero()), int((values == value).count_nonzero()))


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
