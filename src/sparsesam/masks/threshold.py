"""The k-th largest of many numbers, held by one process or spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards

#: A numpy array or a tensor: both know the operators that are used.
Array = Any

_DIGIT = 11
_SAMPLE = 1 << 14


@dataclass(frozen=True)
class Threshold:
    """The k largest are all numbers above ``value``, and ``wanted`` of the ``equal`` ones that are equal to it."""

    value: float
    wanted: int
    equal: int


def kth_largest(values: Sequence[Array], allowed: Sequence[Array], k: int, shards: Shards) -> Threshold:
    """Of the allowed entries of all vectors of all ranks, of which there are at least k >= 1.

    ``values``: at least one vector, all float32, float64, or int64 not below zero; numpy arrays or tensors.
    """
    pairs = list(zip(values, allowed, strict=True))
    if isinstance(values[0], np.ndarray):
        return _by_partition([(v, a) for v, a in pairs if len(v)], k)
    vector = torch.cat([v[a] for v, a in pairs])
    return by_topk(vector, k) if shards.is_whole else _by_digits(vector, k, shards)


def _by_partition(pairs: Sequence[tuple[Array, Array]], k: int) -> Threshold:
    """np.partition; of many numbers, only of those between two quantiles of a sample."""
    low, high, above = -math.inf, math.inf, 0
    size = sum(len(v) for v, _ in pairs)
    if size > 4 * _SAMPLE:
        rng = np.random.default_rng(0)  # the result does not depend on it
        places = [rng.integers(len(v), size=_SAMPLE * len(v) // size) for v, _ in pairs]
        sample = np.sort(np.concatenate([v[i][a[i]] for (v, a), i in zip(pairs, places, strict=True)]))
        middle = len(sample) * (1 - k / sum(np.count_nonzero(a) for _, a in pairs))
        margin = 2 * math.sqrt(len(sample))
        if margin <= middle < len(sample) - margin:
            low, high = sample[int(middle - margin)], sample[int(middle + margin)]
            above = sum(int(np.count_nonzero((v > high) & a)) for v, a in pairs)
    near = np.concatenate([v[(v >= low) & (v <= high) & a] for v, a in pairs])
    if not above < k <= above + len(near):
        near, above = np.concatenate([v[a] for v, a in pairs]), 0
    place = len(near) - (k - above)
    value = np.partition(near, place)[place]
    above += int(np.count_nonzero(near > value))
    return Threshold(value.item(), k - above, int(np.count_nonzero(near == value)))


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
