"""A figure as data: what is shown, apart from how. The page draws it with plotly, files are drawn by matplotlib."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from sparsesam.lab.display.numbers import Number, numbers

Bar = tuple[float, float]
FigureKind = Literal["lines", "points", "bars", "heatmap", "surface", "contour"]


@dataclass(frozen=True)
class Axis:
    """``whole``: only whole numbers have a meaning, such as epochs."""

    title: str
    log: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Series:
    """``color`` and ``number`` are those of its `SeriesStyle`.

    ``bars`` are the low and high end of an error bar, or band, at each point. ``z`` has a row for each y. A ``faint``
    series is a reference: thin and dotted. A point with a ``mark`` has a ring and that word beside it.
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


class SeriesStyle(NamedTuple):
    """``color`` is a name of `colors.COLORS`; ``number`` selects the symbol of points and, beyond
    `colors.PALETTE_SIZE`, the dash of lines.
    """

    color: str = "blue"
    number: int = 0

    def series(self, name: str, x: Iterable[Any], y: Iterable[Any], **options: Any) -> Series:
        """A line, points or bars; values of ``y`` that are not finite become None."""
        return Series(name, self.color, _as_list(x), numbers(_as_list(y)), self.number, **options)

    def grid(self, name: str, x: Iterable[Any], y: Iterable[Any], z: Iterable[Iterable[Any]]) -> Series:
        """Values ``z`` with a row for each y."""
        rows = [numbers(_as_list(row)) for row in z]
        return Series(name, self.color, _as_list(x), _as_list(y), self.number, z=rows)


@dataclass(frozen=True)
class Figure:
    """The page shows one of the ``panels`` at a time; most figures have one, with an empty name."""

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
        """Of all panels."""
        return [one for panel in self.panels.values() for one in panel]

    @property
    def has_content(self) -> bool:
        """Whether there is more to see than single points, which a table shows better."""
        series = [one for one in self.series if not one.faint]
        if self.kind == "lines":
            return any(_known(one) > 1 for one in series)
        return sum(_known(one) for one in series) > 1


def error_bars(
    values: Iterable[Number],
    errors: Iterable[Number],
    *,
    lowest: float = -math.inf,
    highest: float = math.inf,
) -> list[Bar | None]:
    """value ± error, within the bounds of what a value can be; None where one of them is not known."""
    return [
        None if value is None or error is None else (max(lowest, value - error), min(highest, value + error))
        for value, error in zip(values, errors, strict=True)
    ]


def _as_list(values: Iterable[Any]) -> list[Any]:
    """With Python's own numbers."""
    return list(values.tolist() if isinstance(values, np.ndarray) else values)


def _known(series: Series) -> int:
    if series.z is not None:
        return sum(value is not None for row in series.z for value in row)
    return sum(x is not None and y is not None for x, y in zip(series.x, series.y, strict=True))


def rows(figure: Figure) -> Iterator[list[Any]]:
    """The figure's numbers, one point per row, under a heading."""
    several = len(figure.panels) > 1
    with_bars = any(series.bars is not None for series in figure.series)
    titles = [axis.title for axis in (figure.x, figure.y, figure.z) if axis is not None]
    yield [*(["panel"] if several else []), "series", *titles, *(["low", "high"] if with_bars else [])]
    for name, panel in figure.panels.items():
        for series in panel:
            start = [*([name] if several else []), series.name]
            if series.z is not None:
                for y, line in zip(series.y, series.z, strict=True):
                    for x, z in zip(series.x, line, strict=True):
                        yield [*start, x, y, z]
                continue
            for place, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
                bar = (series.bars[place] if series.bars else None) or (None, None)
                yield [*start, x, y, *(bar if with_bars else ())]


def to_csv(figure: Figure) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\r\n").writerows(rows(figure))
    return file.getvalue()
