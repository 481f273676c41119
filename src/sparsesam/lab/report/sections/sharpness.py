"""How far the loss rises within a ball around the weights."""

from __future__ import annotations

from functools import partial

from sparsesam.lab.report.figure import Axis, Figure, Series
from sparsesam.lab.report.names import significant
from sparsesam.lab.report.numbers import number, numbers
from sparsesam.lab.report.section import AnalysisRecord, Cell, ReportData, Section, Table, cells, value

_SIDES = {"every": "every weight", "masked": "the mask’s weights"}


def build(material: ReportData) -> Section:
    rows = [row for found in material.each("sharpness", _rows) for row in found]
    columns = ["run", "perturbed", "rho", "loss", "largest loss", "increase", "by one step", "weights"]
    caption = "The largest increase that gradient ascent found within the ball: a lower bound of the true one."
    blocks: list[Table | Figure] = [Table("sharpness", caption, columns, rows, words=("perturbed",))] if rows else []
    panels = {}
    for side, title in _SIDES.items():
        paths = [path for found in material.each("sharpness", partial(_path, side=side)) for path in found]
        if paths:
            panels[title] = paths
    if panels:
        text = "The best loss after each gradient of the ascent, less that at the weights; it is found where it levels."
        x, y = Axis("gradients taken"), Axis("increase of the loss")
        blocks.append(Figure("sharpness-path", "The ascent", text, "lines", x, y, panels))
    return Section("sharpness", "Sharpness", "sparsesam analyze sharpness RUN…", blocks)


def _rows(found: AnalysisRecord) -> list[list[Cell]]:
    rows = []
    for side, title in _SIDES.items():
        measured = found.result.get(side)
        if measured is None:
            continue
        names = ("rho", "loss", "max_loss", "increase", "one_step")
        values = [number(measured.get(name)) for name in names]
        count = number(measured.get("weights_perturbed"))
        shown = [value(one, significant(one)) for one in values]
        rows.append(cells(found.name, title, *shown, value(count, "–" if count is None else f"{count:,.0f}")))
    return rows


def _path(found: AnalysisRecord, side: str) -> list[Series]:
    measured = found.result.get(side)
    if measured is None:
        return []
    path, start = numbers(measured["path"]), number(measured["loss"])
    if start is None:
        return []
    rises = [None if one is None else one - start for one in path]
    return [Series(found.name, found.color, list(range(len(path))), rises, found.number)]
