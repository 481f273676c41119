"""Figures as data, independent of how they are drawn: with plotly on the page, with matplotlib to files."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from sparsesam.lab.display.numbers import Number, numbers

Bar = tuple[float, float]
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
PALETTE_SIZE = len(_PALETTE)
#: Names and colors of the optimizers, in the order of the report.
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
}


@dataclass(frozen=True)
class Axis:
    """``whole``: values are whole numbers, such as epochs."""

    title: str
    log: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Series:
    """``color`` and ``number`` are those of its `SeriesStyle`.

    ``bars`` are the low and high end of an error bar, or band, at each point. ``z`` has a row for each y. A ``faint``
    series is a thin dotted reference. A point with a ``mark`` has a ring and that label.
    """

    name: str
    color: str
    x: Sequence[Any]
    y: Sequence[Any]
    number: int = 0
    bars: Sequence[Bar | None] | None = None
    z: Sequence[Sequence[Number]] | None = None
    faint: bool = False
    mark: str = ""

    @property
    def known_points(self) -> int:
        values = self.y if self.z is None else [value for row in self.z for value in row]
        return sum(value is not None for value in values)


class SeriesStyle(NamedTuple):
    """``color`` is a name of `COLORS`; ``number`` selects the symbol of points and, beyond `PALETTE_SIZE`, the dash of
    lines.
    """

    color: str = "blue"
    number: int = 0

    def series(
        self, name: str, x: Iterable[Any], y: Iterable[Any], z: Iterable[Iterable[Any]] | None = None, **options: Any
    ) -> Series:
        """Build a series; non-finite values of ``y``, or of ``z`` if given, become None."""
        rows = None if z is None else [numbers(_as_list(row)) for row in z]
        y = numbers(_as_list(y)) if rows is None else _as_list(y)
        return Series(name, self.color, _as_list(x), y, self.number, z=rows, **options)


def assign_styles(optimizers: Sequence[str]) -> list[SeriesStyle]:
    """Returns a style for each series; its number is its index.

    An optimizer's first series has the optimizer's own color, the same in every figure. When all colors are used,
    lines of the next `PALETTE_SIZE` numbers have another dash.
    """
    own = {optimizers.index(name): color for name, (_, color) in OPTIMIZERS.items() if name in optimizers}
    free = [color for color in _PALETTE if color not in own.values()]
    styles = []
    for place in range(len(optimizers)):
        color = own.get(place) or (free.pop(0) if free else _PALETTE[place % PALETTE_SIZE])
        styles.append(SeriesStyle(color, place))
    return styles


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
        """The series of all panels."""
        return [one for panel in self.panels.values() for one in panel]

    @property
    def has_content(self) -> bool:
        """Whether there is more than single points, which a table shows better."""
        counts = [one.known_points for one in self.series if not one.faint]
        return (max(counts, default=0) if self.kind == "lines" else sum(counts)) > 1

    def to_csv(self) -> str:
        """Returns the data as CSV with a header, one point per row."""
        several = len(self.panels) > 1
        with_bars = any(series.bars is not None for series in self.series)
        titles = [axis.title for axis in (self.x, self.y, self.z) if axis is not None]
        file = io.StringIO()
        writer = csv.writer(file)
        writer.writerow([*(["panel"] if several else []), "series", *titles, *(["low", "high"] if with_bars else [])])
        for name, panel in self.panels.items():
            for series in panel:
                start = [*([name] if several else []), series.name]
                if series.z is not None:
                    rows = zip(series.y, series.z, strict=True)
                    writer.writerows([*start, x, y, z] for y, row in rows for x, z in zip(series.x, row, strict=True))
                    continue
                bars = series.bars or [None] * len(series.x)
                for x, y, bar in zip(series.x, series.y, bars, strict=True):
                    writer.writerow([*start, x, y, *((bar or (None, None)) if with_bars else ())])
        return file.getvalue()


def needs_log(values: Iterable[float]) -> bool:
    """Whether the largest of positive values is over 100 times the median: linearly, the rest would look flat."""
    ordered = sorted(values)
    return bool(ordered) and ordered[0] > 0 and ordered[-1] > 100 * statistics.median(ordered)


def error_bars(
    values: Iterable[Number], errors: Iterable[Number], *, lowest: float = -math.inf, highest: float = math.inf
) -> list[Bar | None]:
    """Returns value ± error, clipped to the range of possible values; None where either is not known."""
    return [
        None if value is None or error is None else (max(lowest, value - error), min(highest, value + error))
        for value, error in zip(values, errors, strict=True)
    ]


def _as_list(values: Iterable[Any]) -> list[Any]:
    """Convert to a list, NumPy arrays to Python numbers."""
    return list(values.tolist() if isinstance(values, np.ndarray) else values)
