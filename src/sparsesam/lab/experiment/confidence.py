"""Confidence intervals of the mean over seeds, significant differences, and which variants are as good as the best."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import TypeVar

VariantT = TypeVar("VariantT")
#: Two seeds give an interval of 12.7 standard errors, which says nothing; they have none here and are not ranked.
MIN_SEEDS = 3


def half_width(values: Sequence[float]) -> float | None:
    """Returns half the width of the 95 % interval of the mean, t_{n-1} s / √n; None for fewer than three values."""
    if len(values) < MIN_SEEDS:
        return None
    from scipy.special import stdtrit  # takes a tenth of a second, which `--help` should not

    return float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))


def confidence_interval(values: Sequence[float], highest: float) -> tuple[float, float] | None:
    """Returns the 95 % interval of the mean, clipped to the possible values, from 0 to ``highest``."""
    if (width := half_width(values)) is None:
        return None
    mean = statistics.fmean(values)
    return max(0.0, mean - width), min(highest, mean + width)


def differ(first: Mapping[int, float], second: Mapping[int, float]) -> bool | None:
    """Whether the 95 % interval of the difference of the means excludes 0; None for fewer than three seeds.

    Runs with the same seed share initial weights, batches and noise, so differences are taken seed by seed; with fewer
    than three common seeds, by Welch's test over all seeds.
    """
    differences = [first[seed] - second[seed] for seed in first if seed in second]
    if (width := half_width(differences)) is not None:
        return abs(statistics.fmean(differences)) > width
    if min(len(first), len(second)) < MIN_SEEDS:
        return None
    from scipy import stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # for a variance of 0
        return bool(stats.ttest_ind(list(first.values()), list(second.values()), equal_var=False).pvalue < 0.05)


def rank(values: Mapping[VariantT, Mapping[int, float]], *, highest: bool = True) -> list[VariantT]:
    """Returns the variant with the best mean over its seeds, then those that do not differ significantly from it.

    Nothing unless two variants have at least three seeds.
    """
    means = {key: statistics.fmean(of.values()) for key, of in values.items() if len(of) >= MIN_SEEDS}
    if len(means) < 2:
        return []
    best = (max if highest else min)(means, key=means.__getitem__)
    return [best, *(key for key in means if key != best and not differ(values[key], values[best]))]
