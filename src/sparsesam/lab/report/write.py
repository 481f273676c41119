"""Reads the records of runs, builds the sections, and writes the page."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from sparsesam.lab.display import make_parent, write_plot
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.experiment.run_directory import write_atomically
from sparsesam.lab.report import sections
from sparsesam.lab.report.page import Part, Section, render
from sparsesam.lab.report.tasks import ReportData

StrPath = str | os.PathLike[str]


def write_report(
    runs: Iterable[StrPath],
    out: StrPath = "report.html",
    *,
    title: str | None = None,
    figures: StrPath | None = None,
) -> ReportData:
    """Write one page about all runs at or below ``runs``; with ``figures``, also each figure to that directory.

    The default ``title`` is the sweep's.
    """
    out = Path(out)
    make_parent("--out", out)
    data, shown = build_report(runs)
    made = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M UTC}, {provenance()['command']}"
    page = render(shown, title=title or data.title, made=made, count=data.count(), problems=data.problems)
    write_atomically(out, page)
    if figures is not None:
        make_parent("--figures", Path(figures, "figure.svg"))
        for figure in (figure for section in shown for figure in section.figures):
            write_plot([figure], Path(figures, f"{figure.name}.svg"), Path(figures, f"{figure.name}.pdf"))
    return data


def build_report(runs: Iterable[StrPath]) -> tuple[ReportData, list[Section]]:
    """Returns the data and the sections of a report.

    Each task has a section; runs and machines come last. Empty sections are left out.
    """
    data, built = ReportData(runs), []
    for task in data.tasks:
        parts = [sections.results_part(task), sections.curves_part(task), sections.sparsity_part(task)]
        prefix = f"{task.name}-" if len(data.tasks) > 1 else ""
        built.append(_section(task.name, task.label, [*parts, *sections.analysis_parts(data, task)], prefix))
    built += [
        _section("other-analyses", "Analyses without a run", sections.analysis_parts(data, None)),
        _section("runs", "Runs", [sections.runs_part(data)]),
        _section("machines", "Machines", [Part("", [sections.machines_table(data)])]),
    ]
    return data, [section for section in built if section.parts]


def _section(name: str, title: str, parts: Sequence[Part], prefix: str = "") -> Section:
    """Returns the section without empty tables, figures with single points (the tables show them better), and empty
    parts; the ``prefix`` of its blocks' names makes them unique on the page.
    """
    kept = [[replace(block, name=prefix + block.name) for block in part.blocks if block.has_content] for part in parts]
    shown = [replace(part, blocks=blocks) for part, blocks in zip(parts, kept, strict=True)]
    return Section(name, title, [part for part in shown if part.blocks or part.lead or part.notes])
