"""The k-th largest of many numbers, held by one process or spread over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards

_DIGIT = 11


def kth_largest(values: Tensor, k: int, shards: Shards) -> float:
    """Of all entries of this vector and those of the other ranks, of which there are at least k >= 1.

    ``values`` are float32, float64, or int64 not below zero.
    """
    if shards.is_whole and values.device.type == "cpu":
        return _kth_largest_on_cpu(values.numpy(), k)
    return kth_largest_by_digits(values, k, shards)


def _kth_largest_on_cpu(values: npt.NDArray[Any], k: int) -> float:
    """By partition of only what is between two quantiles of a sample, where that contains it.

    Of 11 M numbers 0.03 s where a partition of them all takes 0.07, and 0.05 s for 0.9 where 60 % of them are zero.
    """
    if len(values) > 1 << 16:
        sample = np.sort(values[:: len(values) // 8192])
        place = round((1 - k / len(values)) * len(sample))
        low, high = sample[max(place - 256, 0)], sample[min(place + 256, len(sample) - 1)]
        above = int(np.count_nonzero(values > high))
        between = values[(values >= low) & (values <= high)]
        if above < k <= above + len(between):
            if low == high:
                between, k = between[:1], above + 1
            values, k = between, k - above
    found: float = np.partition(values, len(values) - k)[len(values) - k].item()
    return found


def kth_largest_by_digits(values: Tensor, k: int, shards: Shards) -> float:
    """From a few histograms of 2048 counts.

    Each round looks at eleven more bits: ranks add up how many of their keys have each value of them, and continue with
    the value that contains the k-th largest. Rounds and their 16 kB depend on the width of a number alone.
    """
    bits = 8 * values.element_size()
    integers = torch.int32 if bits == 32 else torch.int64
    # Unsigned integers in the order of the numbers, of which 64 bits are held in an int64; -0.0 + 0 is 0.0.
    pattern = (values + 0).view(integers).long()
    keys = torch.where(pattern < 0, ~pattern, pattern + (2**31 if bits == 32 else -(2**63)))
    key = 0
    for shift in reversed(range(0, bits, _DIGIT)):
        digits = (keys >> shift) & (2 ** min(_DIGIT, bits - shift) - 1)
        counts = shards.sum(torch.bincount(digits, minlength=2**_DIGIT).cpu())
        from_top = counts.flip(0).cumsum(0)
        place = int(torch.searchsorted(from_top, k))
        digit = 2**_DIGIT - 1 - place
        k -= int(from_top[place] - counts[digit])
        key |= digit << shift
        keys = keys[digits == digit]
    half = 2 ** (bits - 1)
    return torch.tensor(key - half if key >= half else ~key, dtype=integers).view(values.dtype).item()
