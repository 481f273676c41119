"""The loss around the weights: surfaces to turn, their contours, and lines through them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from sparsesam.lab.report.figure import Axis, Figure, Series
from sparsesam.lab.report.numbers import Number, number, numbers
from sparsesam.lab.report.section import AnalysisRecord, ReportData, Section

#: A loss this many times its median somewhere would flatten everything else, so the logarithm is drawn.
_WIDE = 100
_HINT = "sparsesam analyze landscape RUN… (also --dimensions 1, --along eigenvectors, --between)"


def build(material: ReportData) -> Section:
    blocks: list[Figure] = []
    for analysis, words, unit in (
        ("landscape-2d", "filter-normalized random directions", "direction"),
        ("landscape-eigenvectors", "the two leading eigenvectors of the Hessian", "distance along eigenvector"),
    ):
        surfaces = material.each(analysis, _surface)
        if surfaces:
            blocks += _views(analysis, words, unit, surfaces)
    for analysis, title, axis in (
        ("landscape-1d", "Loss along a line", "distance along one filter-normalized random direction"),
        ("landscape-between", "Loss between two runs", "share of the way from the first run to the second"),
    ):
        lines = material.each(analysis, partial(_line, material))
        if lines:
            caption = "The same random numbers for all runs, scaled to each run’s own filters."
            if analysis == "landscape-between":
                caption = "On the straight line from one run’s weights (0) to another’s (1)."
            blocks.append(Figure(analysis, title, caption, "lines", Axis(axis), Axis("loss"), {"": lines}))
    return Section("landscapes", "Loss landscapes", _HINT, blocks)


def _views(analysis: str, words: str, unit: str, surfaces: Sequence[Series]) -> list[Figure]:
    """Surface, contours and a cut: all runs on one scale, so that flat and sharp can be told by eye."""
    losses = sorted(z for one in surfaces for line in one.z or () for z in line if z is not None)
    if not losses:
        return []
    logarithm = losses[-1] > _WIDE * max(losses[len(losses) // 2], 1e-12) and losses[0] > 0
    title = "log10 of the loss" if logarithm else "loss"
    drawn = [_logarithm(one) for one in surfaces] if logarithm else list(surfaces)
    low, high = (math.log10(losses[0]), math.log10(losses[-1])) if logarithm else (losses[0], losses[-1])
    panels = {one.name: [one] for one in drawn}
    x, y, z = Axis(f"{unit} 1"), Axis(f"{unit} 2"), Axis(title)
    shared = f"Along {words}, all runs on one scale."
    cuts = [_cut(one) for one in drawn]
    over_plane = partial(Figure, x=x, y=y, z=z, panels=panels, range_z=(low, high))
    return [
        over_plane(
            name=f"{analysis}-surface",
            title="Surface" if analysis == "landscape-2d" else "Surface along eigenvectors",
            caption=f"{shared} Drag to turn it, or use the arrow keys.",
            kind="surface",
        ),
        over_plane(
            name=f"{analysis}-contours",
            title="Contours" if analysis == "landscape-2d" else "Contours along eigenvectors",
            caption=f"{shared} The run’s weights are in the middle.",
            kind="contour",
        ),
        Figure(
            name=f"{analysis}-cut",
            title="Cut through the middle" if analysis == "landscape-2d" else "Cut along the leading eigenvector",
            caption="The row of each surface that is nearest to the run’s weights: the flatter, the wider.",
            kind="lines",
            x=x,
            y=z,
            panels={"": cuts},
        ),
    ]


def _surface(found: AnalysisRecord) -> Series:
    z = [numbers(line) for line in found.result["loss"]]
    x, y = numbers(found.result["x"]), numbers(found.result["y"])
    if not x or len(z) != len(y) or any(len(line) != len(x) for line in z):
        raise ValueError(f"loss must have {len(y)} rows of {len(x)} numbers")
    return Series(found.name, found.color, x, y, found.number, z=z)


def _line(material: ReportData, found: AnalysisRecord) -> Series:
    x, loss = numbers(found.result["x"]), numbers(found.result["loss"])
    if len(x) != len(loss):
        raise ValueError(f"{len(x)} places, but {len(loss)} losses")
    other = found.made.get("other")
    name = f"{found.name} to {material.name_at(str(other))}" if other else found.name
    return Series(name, found.color, x, loss, found.number)


def _cut(surface: Series) -> Series:
    assert surface.z is not None
    row = min(range(len(surface.y)), key=lambda place: abs(number(surface.y[place]) or 0.0))
    return Series(surface.name, surface.color, surface.x, surface.z[row], surface.number)


def _logarithm(surface: Series) -> Series:
    assert surface.z is not None
    z: list[list[Number]] = [[None if one is None else math.log10(one) for one in line] for line in surface.z]
    return Series(surface.name, surface.color, surface.x, surface.y, surface.number, z=z)
