"""Does the Fisher information, which SSAM-F masks by, tell where the curvature is?"""

from __future__ import annotations

from sparsesam.lab.report.figure import Axis, Figure, Series
from sparsesam.lab.report.names import percent, significant
from sparsesam.lab.report.numbers import number, numbers
from sparsesam.lab.report.section import AnalysisRecord, Cell, ReportData, Section, Table, cells, value

_SHOWN = ("pearson", "spearman", "pearson_magnitude", "spearman_magnitude")


def build(material: ReportData) -> Section:
    blocks: list[Table | Figure] = []
    for analysis, where in (("fisher", ""), ("fisher-layers", " of some layers")):
        rows = material.each(analysis, _row)
        if not rows:
            continue
        caption = (
            f"Correlation of the Fisher information{where} with the Hessian’s diagonal h, and with its magnitude |h|."
        )
        columns = ["run", "Pearson, h", "Spearman, h", "Pearson, |h|", "Spearman, |h|", "h < 0"]
        blocks.append(Table(analysis, caption, columns, rows))
        pairs = material.each(analysis, _pairs)
        caption = "Up to 2000 weights. Pairs with a zero have no place on logarithmic axes."
        x, y = Axis("Fisher information", log=True), Axis("|h|", log=True)
        panels = {one.name: [one] for one in pairs}
        blocks.append(Figure(f"{analysis}-scatter", "Fisher and Hessian", caption, "points", x, y, panels))
        kept = [one for one in material.each(analysis, _kept) if one.x]
        if kept:
            chance = Series("by chance", "other", kept[0].x, [100 * (1 - one) for one in kept[0].x], faint=True)
            caption = "Of the weights that Fisher keeps, the share that |h| would keep too."
            x, y = Axis("sparsity"), Axis("kept by both (%)")
            blocks.append(Figure(f"{analysis}-kept", "Kept in common", caption, "lines", x, y, {"": [*kept, chance]}))
    return Section("fisher", "Fisher and Hessian", "sparsesam analyze fisher RUN… (small models)", blocks)


def _row(found: AnalysisRecord) -> list[Cell]:
    values = [number(found.result.get(name)) for name in _SHOWN]
    negative = number(found.result.get("negative_share"))
    return cells(found.name, *(value(one, significant(one, 3)) for one in values), value(negative, percent(negative)))


def _pairs(found: AnalysisRecord) -> Series:
    pairs = [numbers(pair) for pair in found.result["scatter"]]
    shown = [(f, abs(h)) for f, h in pairs if f and h]
    return Series(found.name, found.color, [f for f, _ in shown], [h for _, h in shown], found.number)


def _kept(found: AnalysisRecord) -> Series:
    kept = {float(name): number(one) for name, one in (found.result.get("kept_in_common") or {}).items()}
    shares = [None if one is None else 100 * one for one in kept.values()]
    return Series(found.name, found.color, list(kept), shares, found.number)
