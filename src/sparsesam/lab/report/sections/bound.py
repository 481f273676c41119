"""Theorem 3, term by term."""

from __future__ import annotations

from sparsesam.lab.report.figure import Axis, Figure, Series
from sparsesam.lab.report.names import significant
from sparsesam.lab.report.numbers import number
from sparsesam.lab.report.section import AnalysisRecord, Cell, ReportData, Section, Table, cells, value

_SIDES = {"every": "", "masked": " (masked)"}
_GENERAL = ("the theorem", "the maximum", "it supposes")
_TERMS = {"dimension_term": "dimension", "confidence_term": "confidence", "remainder": "remainder"}


def build(material: ReportData) -> Section:
    rows = [row for found in material.each("bound", _rows) for row in found]
    if not rows:
        return Section("bound", "Generalization bound", "sparsesam analyze bound RUN…", [])
    columns = [
        "run",
        "bound",
        "largest loss within rho",
        "complexity",
        "a guess’s loss",
        "says something",
        "k",
        "n",
        "rho",
    ]
    caption = "Test loss ≤ largest loss within rho + complexity. Where it is not below a guess’s loss it says nothing."
    terms = [one for found in material.each("bound", _terms) for one in found]
    figure = Figure(
        name="bound-terms",
        title="Under the root",
        caption="complexity = sqrt((dimension + confidence + remainder) / (n − 1)).",
        kind="bars",
        x=Axis("term"),
        y=Axis("size", log=True),
        panels={"": terms},
    )
    words = dict.fromkeys(word for found in material.each("bound", _words) for word in found)
    table = Table("bound", caption, columns, rows, words=("says something",))
    return Section("bound", "Generalization bound", "", [table, figure], notes=list(words))


def _rows(found: AnalysisRecord) -> list[list[Cell]]:
    rows = []
    for side, words in _SIDES.items():
        bound = found.result.get(side)
        if bound is None:
            continue
        names = ("bound", "max_loss", "complexity", "threshold")
        shown = [value(number(bound.get(name)), significant(number(bound.get(name)))) for name in names]
        counts = [value(number(bound.get(name)), f"{number(bound.get(name)) or 0:,.0f}") for name in ("k", "n")]
        verdict = Cell("no: vacuous", status="failed") if bound["vacuous"] else Cell("yes", status="finished")
        rho = number(bound.get("rho"))
        rows.append(cells(found.name + words, *shown, verdict, *counts, value(rho, significant(rho))))
    return rows


def _terms(found: AnalysisRecord) -> list[Series]:
    return [
        Series(
            found.name + words,
            found.color,
            list(_TERMS.values()),
            [number(bound[name]) for name in _TERMS],
            found.number,
            faint=side == "masked",
        )
        for side, words in _SIDES.items()
        if (bound := found.result.get(side)) is not None
    ]


def _words(found: AnalysisRecord) -> list[str]:
    """What holds of the theorem whatever the run; words about a run's own numbers are in the table."""
    sides = [bound for side in _SIDES if (bound := found.result.get(side)) is not None]
    return [str(word) for bound in sides for word in bound.get("words", []) if word.startswith(_GENERAL)]
