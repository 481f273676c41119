"""How well a few seeds tell two settings apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

#: The 97.5 % quantiles of Student's t for 1, 2, 3, … degrees of freedom.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def half_width(values: Sequence[float]) -> float | None:
    """Of the 95 % interval of the mean, t_{n-1} s / √n; None for fewer than two values."""
    count = len(values)
    if count < 2:
        return None
    freedom = count - 1
    # Beyond the table the expansion in 1/n, right to its three digits.
    student = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.960 + 2.372 / freedom + 2.82 / freedom**2
    return student * statistics.stdev(values) / math.sqrt(count)


def differ(first: Mapping[int, float], second: Mapping[int, float]) -> bool | None:
    """Whether the 95 % interval of the mean difference leaves out 0, over the seeds of both; None for fewer than two.

    Runs of one seed share their first weights, batches and noise, so differences are taken seed by seed.
    """
    differences = [first[seed] - second[seed] for seed in first if seed in second]
    width = half_width(differences)
    return None if width is None else abs(statistics.fmean(differences)) > width
