"""Theorems 1 and 2 against measured runs of a smooth problem."""

from __future__ import annotations

from typing import Any

from sparsesam.lab.report.figure import Axis, Figure, Series
from sparsesam.lab.report.names import significant
from sparsesam.lab.report.numbers import number, numbers
from sparsesam.lab.report.section import AnalysisRecord, Cell, ReportData, Section, Table, cells, value

_METHODS = {"SAM": "sam", "SSAM": "ssam-random"}


def build(material: ReportData) -> Section:
    made = material.each("convergence", _panels)
    several = len(made) > 1
    panels = {f"{method}, {name}" if several else method: one for name, lines in made for method, one in lines.items()}
    if not panels:
        return Section("convergence", "Convergence", "sparsesam analyze convergence --out DIR, then report DIR", [])
    figure = Figure(
        name="convergence",
        title="Measured and bound",
        caption="1/T Σ ||∇f(w_t)||², mean over the runs, and the theorem’s right-hand side: as printed, with log T, "
        "and with Σ 1/t in its place, which the proof needs.",
        kind="lines",
        x=Axis("T", log=True),
        y=Axis("mean squared gradient norm", log=True),
        panels=panels,
    )
    rows = [row for found in material.each("convergence", _assumptions) for row in found]
    caption = "What the theorem supposes, checked along the runs."
    table = Table("assumptions", caption, ["assumption", "left", "right", "holds", "how"], rows, ("holds", "how"))
    words = dict.fromkeys(word for found in material.each("convergence", _words) for word in found)
    return Section("convergence", "Convergence", "", [figure, *([table] if rows else [])], notes=list(words))


def _methods(found: AnalysisRecord) -> dict[str, dict[str, Any]]:
    return {method: one for method in _METHODS if (one := found.result.get(method)) is not None}


def _panels(found: AnalysisRecord) -> tuple[str, dict[str, list[Series]]]:
    panels = {}
    for method, one in _methods(found).items():
        steps, color = numbers(one["T"]), _METHODS[method]
        lines = {name: numbers(one[name]) for name in ("measured", "deviation", "bound", "bound_harmonic")}
        if any(len(line) != len(steps) for line in lines.values()):
            raise ValueError(f"{method}: every curve must have {len(steps)} points, one per T")
        panels[method] = [
            Series("measured", color, steps, lines["measured"], error=lines["deviation"]),
            Series("bound, log T", "other", steps, _positive(lines["bound"])),
            Series("bound, Σ 1/t", "other", steps, _positive(lines["bound_harmonic"]), number=1),
        ]
    return found.name, panels


def _positive(values: list[float | None]) -> list[float | None]:
    """The printed bound can be 0 or less at T = 1, which has no place on a logarithmic axis."""
    return [one if one is not None and one > 0 else None for one in values]


def _assumptions(found: AnalysisRecord) -> list[list[Cell]]:
    rows = []
    for method, one in _methods(found).items():
        for assumption in one.get("assumptions", []):
            left, right = number(assumption["left"]), number(assumption["right"])
            verdict = Cell("yes", status="finished") if assumption["holds"] else Cell("no", status="failed")
            name, how = f"{method}: {assumption['text']}", str(assumption.get("how", ""))
            rows.append(cells(name, value(left, significant(left)), value(right, significant(right)), verdict, how))
    return rows


def _words(found: AnalysisRecord) -> list[str]:
    return [f"{method}: {word}" for method, one in _methods(found).items() for word in one.get("words", [])]
