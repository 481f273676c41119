"""How much SAM's gradient differs from SGD's (figure 1 of the paper)."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

from sparsesam.lab.report.figure import Axis, Figure, Series
from sparsesam.lab.report.names import percent, significant
from sparsesam.lab.report.numbers import number, numbers
from sparsesam.lab.report.section import AnalysisRecord, Cell, ReportData, Section, Table, cells, value

_GROUPS = {"every": "every weight", "inside": "inside the mask", "outside": "outside the mask"}


def build(material: ReportData) -> Section:
    rows = material.each("gradients", _row)
    if not rows:
        return Section("gradients", "Gradient difference", "sparsesam analyze gradients RUN…", [])
    panels = {}
    for group, title in _GROUPS.items():
        histograms = [one for found in material.each("gradients", partial(_histogram, group=group)) for one in found]
        if histograms:
            panels[title] = histograms
    logarithms = sorted({str(one) for one in material.each("gradients", lambda found: found.result.get("logarithm"))})
    base = " or ".join(logarithms)
    blocks: list[Table | Figure] = [_table(rows)]
    blocks.append(
        Figure(
            name="gradient-difference",
            title="Histogram of r",
            caption=f"r = {base} |(g_SAM − g_SGD) / g_SGD| of every weight. Left of 0 SAM’s "
            "gradient differs by less than the gradient itself, so that the perturbation hardly matters.",
            kind="lines",
            x=Axis("r"),
            y=Axis("share of the weights per bin"),
            panels=panels,
        )
    )
    layers = [one for one in material.each("gradients", _layers) if one.x]
    if layers:
        caption = "The share of each layer’s weights with r < 0."
        x, y = Axis("parameter"), Axis("share with r < 0 (%)")
        blocks.append(Figure("gradient-difference-layers", "By layer", caption, "bars", x, y, {"": layers}))
    return Section("gradients", "Gradient difference", "", blocks)


def _table(rows: list[list[Cell]]) -> Table:
    columns = ["run", "r < 0", "r < 0 inside the mask", "r < 0 outside", "median r", "rho", "weights"]
    return Table("gradients", "The share of weights with r < 0, among those that have an r.", columns, rows)


def _row(found: AnalysisRecord) -> list[Cell]:
    every = found.result["every"]
    shares = [number((found.result.get(group) or {}).get("share_below_zero")) for group in _GROUPS]
    median, rho = number((every.get("quantiles") or {}).get("0.5")), number(found.result.get("rho"))
    weights = number(every.get("weights"))
    return cells(
        found.name,
        *(value(share, percent(share)) for share in shares),
        value(median, significant(median, 3)),
        value(rho, significant(rho)),
        value(weights, "–" if weights is None else f"{weights:,.0f}"),
    )


def _histogram(found: AnalysisRecord, group: str) -> list[Series]:
    measured: dict[str, Any] | None = found.result.get(group)
    if measured is None:
        return []
    edges, counts = numbers(found.result["edges"]), numbers(measured["histogram"])
    if len(edges) != len(counts) + 1:
        raise ValueError(f"{len(edges)} edges do not fit {len(counts)} bins")
    total = number(measured["weights"]) or 1.0
    middles = [None if a is None or b is None else (a + b) / 2 for a, b in itertools.pairwise(edges)]
    return [
        Series(
            found.name,
            found.color,
            middles,
            [None if count is None else count / total for count in counts],
            found.number,
        )
    ]


def _layers(found: AnalysisRecord) -> Series:
    layers = found.result.get("layers") or {}
    shares = [number(one.get("share_below_zero")) for one in layers.values()]
    below = [None if share is None else 100 * share for share in shares]
    return Series(found.name, found.color, list(layers), below, found.number)
