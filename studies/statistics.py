"""Means with their uncertainty, and comparisons seed by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from sparsesam.lab.experiment.variants import half_width


@dataclass(frozen=True)
class Mean:
    """``interval`` is half of the 95 % confidence interval, by Student's t."""

    value: float
    interval: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        width = half_width(values)
        return cls(fmean(values), math.nan if width is None else width, len(values))

    def __str__(self) -> str:
        """Format as a difference."""
        return f"{self.value:+.1f}" if self.count == 1 else f"{self.value:+.1f} ± {self.interval:.1f}"


def paired(better: Mapping[int, float], worse: Mapping[int, float]) -> Mean:
    """Returns the difference over common seeds, which share data and initial weights."""
    seeds = sorted(better.keys() & worse.keys())
    return Mean.of([better[seed] - worse[seed] for seed in seeds])


def verdict(difference: Mean, *, within: float | None = None) -> str:
    """Judge "better > worse", or "better = worse" to within a margin in points."""
    low, high = difference.value - difference.interval, difference.value + difference.interval
    if math.isnan(low):
        return "undecided"
    if within is not None:
        if -within <= low and high <= within:
            return "confirmed"
        return "refuted" if high < -within or low > within else "undecided"
    return "confirmed" if low > 0 else "refuted" if high < 0 else "undecided"
