"""Confidence intervals of the mean over seeds, and tests whether two settings differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence


def half_width(values: Sequence[float]) -> float | None:
    """Returns half the width of the 95 % interval of the mean, t_{n-1} s / √n; None for fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit

    return float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))


def confidence_interval(
    values: Sequence[float], *, lowest: float = -math.inf, highest: float = math.inf
) -> tuple[float, float] | None:
    """Returns the 95 % interval of the mean, clipped to the range of possible values (0 to 1 for an accuracy)."""
    width = half_width(values)
    if width is None:
        return None
    mean = statistics.fmean(values)
    return max(lowest, mean - width), min(highest, mean + width)


def differ(first: Mapping[int, float], second: Mapping[int, float]) -> bool | None:
    """Whether the 95 % interval of the mean difference over common seeds excludes 0; None for fewer than two.

    Runs with the same seed share initial weights, batches and noise, so differences are taken seed by seed.
    """
    differences = [first[seed] - second[seed] for seed in first if seed in second]
    width = half_width(differences)
    return None if width is None else abs(statistics.fmean(differences)) > width
