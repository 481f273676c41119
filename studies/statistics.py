"""Means with their uncertainty, and comparisons seed by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.stats import t as student


@dataclass(frozen=True)
class Mean:
    """``interval`` is half of the 95 % confidence interval, by Student's t."""

    value: float
    standard_error: float
    interval: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        count = len(values)
        if count < 2:
            return cls(fmean(values), math.nan, math.nan, count)
        error = stdev(values) / math.sqrt(count)
        return cls(fmean(values), error, float(student.ppf(0.975, count - 1)) * error, count)


def paired(better: Mapping[int, float], worse: Mapping[int, float]) -> Mean:
    """The difference over the seeds that both have: same data, same first weights."""
    seeds = sorted(better.keys() & worse.keys())
    return Mean.of([better[seed] - worse[seed] for seed in seeds])


def verdict(difference: Mean, *, within: float | None = None, one_sided: bool = False) -> str:
    """Of "better > worse", or of "better = worse" (``one_sided``: >=) to within so many points."""
    low, high = difference.value - difference.interval, difference.value + difference.interval
    if math.isnan(low):
        return "undecided"
    if within is not None:
        if low >= -within and (one_sided or high <= within):
            return "confirmed"
        return "refuted" if high < -within or (low > within and not one_sided) else "undecided"
    return "confirmed" if low > 0 else "refuted" if high < 0 else "undecided"
