"""Fewer points per curve, so that a page of many runs stays small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparsesam.lab.display.figure import Figure, Series

#: Points of all figures together, about 20 bytes each: the page stays well below 10 MB with plotly's 5.
BUDGET = 150_000
_MOST, _FEWEST = 500, 20


def points_per_curve(figures: Sequence[Figure]) -> int:
    """The limit at which all figures fit into the budget; surfaces are not downsampled."""
    series = [one for figure in figures for panel in figure.panels.values() for one in panel]
    curves = sum(one.z is None for one in series)
    left = BUDGET - sum(len(one.x) * len(one.y) for one in series if one.z is not None)
    return max(_FEWEST, min(_MOST, left // max(curves, 1)))


def downsampled(series: Series, limit: int) -> Series:
    """Every k-th point and the last."""
    if series.z is not None or len(series.x) <= limit:
        return series
    stride = -(-len(series.x) // (limit - 1))
    kept = sorted({*range(0, len(series.x), stride), len(series.x) - 1})
    return replace(
        series,
        x=[series.x[place] for place in kept],
        y=[series.y[place] for place in kept],
        bars=None if series.bars is None else [series.bars[place] for place in kept],
    )
