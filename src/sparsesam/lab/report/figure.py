"""A figure as data: what is drawn, apart from how. The page draws it with plotly, a paper's file with matplotlib."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sparsesam.lab.report.numbers import Number

Kind = Literal["lines", "points", "bars", "heatmap", "surface", "contour"]


@dataclass(frozen=True)
class Axis:
    title: str
    log: bool = False


@dataclass(frozen=True)
class Series:
    """``color`` is an optimizer's name; ``number`` tells series of one colour apart, by symbol or dash.

    ``error`` is ± around y. ``z`` has a row for each y. A ``faint`` series is for reference: thin and dotted.
    """

    name: str
    color: str
    x: Sequence[Any]
    y: Sequence[Any]
    number: int = 0
    error: Sequence[Number] | None = None
    z: Sequence[Sequence[Number]] | None = None
    faint: bool = False


@dataclass(frozen=True)
class Figure:
    """``panels`` are drawn one at a time, the reader choosing; most figures have one, whose name is empty."""

    name: str
    title: str
    caption: str
    kind: Kind
    x: Axis
    y: Axis
    panels: Mapping[str, Sequence[Series]]
    z: Axis | None = None
    range_z: tuple[float, float] | None = None


def rows(figure: Figure) -> Iterator[list[Any]]:
    """The figure's numbers, one point per row, under a heading."""
    several = len(figure.panels) > 1
    everything = [series for panel in figure.panels.values() for series in panel]
    with_error = any(series.error is not None for series in everything)
    titles = [axis.title for axis in (figure.x, figure.y, figure.z) if axis is not None]
    yield [*(["panel"] if several else []), "series", *titles, *(["±"] if with_error else [])]
    for name, panel in figure.panels.items():
        for series in panel:
            start = [*([name] if several else []), series.name]
            if series.z is not None:
                for y, line in zip(series.y, series.z, strict=True):
                    for x, z in zip(series.x, line, strict=True):
                        yield [*start, x, y, z]
                continue
            for place, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
                yield [*start, x, y, *([series.error[place] if series.error else None] if with_error else [])]


def to_csv(figure: Figure) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\r\n").writerows(rows(figure))
    return file.getvalue()
