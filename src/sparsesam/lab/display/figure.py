"""Figures as data, independent of how they are drawn: with plotly on the page, with matplotlib to files."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from sparsesam.lab.display.numbers import Number, number

FigureKind = Literal["lines", "points", "bars", "heatmap", "surface", "contour"]

#: Colors for light and dark pages, with a contrast of at least 3 : 1 to the background; distinguishable with a color
#: vision deficiency.
COLORS = {
    "grey": ("#6b7280", "#a3acba"),
    "blue": ("#0072b2", "#4aa8e0"),
    "orange": ("#d55e00", "#ff8c42"),
    "green": ("#00876a", "#2fc79d"),
    "pink": ("#b8578f", "#ee9bc9"),
    "gold": ("#8a6d1d", "#d9b64c"),
    "violet": ("#5b4a9c", "#a898e8"),
    "cyan": ("#1f8fa8", "#7fd3e6"),
    "red": ("#b3261e", "#ff7b72"),
    "lime": ("#5a7d00", "#a8d14a"),
    "brown": ("#7a4a2b", "#d0a07a"),
    "ink": ("#374151", "#d1d5db"),
}
#: "ink" is for reference lines, such as a bound or chance.
_PALETTE = [name for name in COLORS if name != "ink"]
#: Names and colors of the optimizers; a method has its color and the marker of its place here in every figure.
OPTIMIZERS = {
    "sgd": ("SGD", "grey"),
    "adam": ("Adam", "gold"),
    "adamw": ("AdamW", "violet"),
    "sam": ("SAM", "blue"),
    "asam": ("ASAM", "cyan"),
    "ssam": ("SSAM", "ink"),
    "ssam-f": ("SSAM-F", "orange"),
    "ssam-d": ("SSAM-D", "green"),
    "sam-on": ("SAM-ON", "lime"),
    "ssam-g": ("SSAM, largest gradients", "brown"),
    "ssam-random": ("SSAM, random mask", "pink"),
    "auto": ("recommended", "red"),
    "gsam": ("GSAM", "gold"),
    "wsam": ("WSAM", "violet"),
    "friendly-sam": ("Friendly-SAM", "pink"),
    "look-sam": ("LookSAM", "green"),
    "esam": ("ESAM", "brown"),
    "zsharp": ("ZSharp", "lime"),
}
#: More bands than this would hide each other: none are drawn.
MOST_BANDS = 3


@dataclass(frozen=True)
class Axis:
    """``whole``: values are whole numbers, such as epochs."""

    title: str
    log: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Series:
    """``color``, ``marker`` and ``variant`` are those of its `SeriesStyle`.

    ``bars`` are the low and high end of an error bar, or band, at each point. ``z`` has a row for each y. A ``faint``
    series is a thin dotted reference, a ``chosen`` point has a ring. ``shift`` is how far the series is drawn to the
    right of its x, so that it does not hide another.
    """

    name: str
    color: str
    x: Sequence[Any]
    y: Sequence[Any]
    marker: int = 0
    variant: int = 0
    bars: Sequence[tuple[float, float] | None] | None = None
    z: Sequence[Sequence[Number]] | None = None
    faint: bool = False
    chosen: bool = False
    shift: float = 0.0

    @property
    def known_points(self) -> int:
        values = self.y if self.z is None else [value for row in self.z for value in row]
        return sum(value is not None for value in values)


class SeriesStyle(NamedTuple):
    """``color`` is a name of `COLORS`. ``variant`` counts the series of one method: it selects the dash of lines, and
    whether markers are filled.
    """

    color: str = "blue"
    marker: int = 0
    variant: int = 0

    def series(
        self, name: str, x: Iterable[Any], y: Iterable[Any], z: Iterable[Iterable[Any]] | None = None, **options: Any
    ) -> Series:
        """Build a series; non-finite values of ``y``, or of ``z`` if given, become None."""
        rows = None if z is None else [list(map(number, _as_list(row))) for row in z]
        heights = _as_list(y) if z is not None else list(map(number, _as_list(y)))
        return Series(name, self.color, _as_list(x), heights, self.marker, self.variant, z=rows, **options)


def assign_styles(methods: Sequence[str]) -> list[SeriesStyle]:
    """Returns a style for each series from its method, a key of `OPTIMIZERS`; others get colors that are left."""
    own = [OPTIMIZERS[name][1] for name in methods if name in OPTIMIZERS]
    free = itertools.cycle([color for color in _PALETTE if color not in own] or _PALETTE)
    known, others, styles = list(OPTIMIZERS), itertools.count(len(OPTIMIZERS)), []
    for place, name in enumerate(methods):
        if name in OPTIMIZERS:
            styles.append(SeriesStyle(OPTIMIZERS[name][1], known.index(name), methods[:place].count(name)))
        else:
            styles.append(SeriesStyle(next(free), next(others)))
    return styles


def side_by_side(points: Sequence[Series]) -> list[Series]:
    """Shift series of one point each that would hide each other: neighbors by 2.5 % of the figure's width."""
    boxes = [(point.x[0], *((point.bars and point.bars[0]) or (point.y[0], point.y[0]))) for point in points]
    if not boxes:
        return []
    x, low, high = (np.array(values, dtype=np.float64) for values in zip(*boxes, strict=True))
    width, gap = float(np.ptp(x)) or abs(float(x[0])) or 1.0, 0.03 * float(high.max() - low.min())
    hides = (abs(x[:, None] - x) < 0.01 * width) & (low[:, None] <= high + gap) & (low <= high[:, None] + gap)
    rank = np.argsort(np.argsort(x, kind="stable"))
    places = ((hides & (rank <= rank[:, None])).sum(1) - (hides.sum(1) + 1) / 2).tolist()
    return [replace(point, shift=0.025 * width * place) for point, place in zip(points, places, strict=True)]


@dataclass(frozen=True)
class Figure:
    """The page shows one of the ``panels`` at a time; most figures have a single panel with an empty name."""

    name: str
    title: str
    caption: str
    x: Axis
    y: Axis
    panels: Mapping[str, Sequence[Series]]
    kind: FigureKind = "lines"
    z: Axis | None = None
    range_z: tuple[float, float] | None = None

    @property
    def series(self) -> list[Series]:
        return [series for panel in self.panels.values() for series in panel]

    @property
    def has_content(self) -> bool:
        """Whether there is more than single points, which a table shows better."""
        panels = [[series.known_points for series in panel if not series.faint] for panel in self.panels.values()]
        count = max if self.kind == "lines" else sum
        return any(count(panel or [0]) > 1 for panel in panels)

    @property
    def has_many_bands(self) -> bool:
        """Whether a panel has more bands than are drawn at a time."""
        bands = [sum(series.bars is not None for series in panel) for panel in self.panels.values()]
        return self.kind == "lines" and max(bands) > MOST_BANDS


def needs_log(values: Iterable[float]) -> bool:
    """Whether the largest of positive values is over 100 times the median: linearly, the rest would look flat."""
    ordered = sorted(values)
    return bool(ordered) and ordered[0] > 0 and ordered[-1] > 100 * statistics.median(ordered)


def _as_list(values: Iterable[Any]) -> list[Any]:
    """Convert to a list, NumPy arrays to Python numbers."""
    return list(values.tolist() if isinstance(values, np.ndarray) else values)
