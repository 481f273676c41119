"""Reads the records of runs, builds the sections, and writes the page."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from sparsesam.lab.display import make_parent, write_figures
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.experiment.run_directory import write_atomically
from sparsesam.lab.report.page import Part, Section, render
from sparsesam.lab.report.sections.analyses import analysis_parts
from sparsesam.lab.report.sections.results import curves_part, overview_table, results_part, sparsity_part
from sparsesam.lab.report.sections.runs import machines_table, runs_table, unfinished_table
from sparsesam.lab.report.tasks import ReportData, Task

StrPath = str | os.PathLike[str]


def write_report(
    runs: Iterable[StrPath],
    out: StrPath = "report.html",
    *,
    title: str | None = None,
    figures: StrPath | None = None,
    bounds: bool = False,
) -> ReportData:
    """Write one page about all runs at or below ``runs``; with ``figures``, also each figure to that directory.

    The default ``title`` is the sweep's. ``bounds`` shows generalization bounds even if they are vacuous.
    """
    out = Path(out)
    make_parent("--out", out)
    data, sections = build_report(runs, bounds=bounds)
    made = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M UTC}, {provenance()['command']}"
    page = render(sections, title=title or data.title, made=made, count=data.count(), problems=data.problems)
    write_atomically(out, page)
    if figures is not None:
        write_figures([figure for section in sections for figure in section.figures], Path(figures))
    return data


def build_report(runs: Iterable[StrPath], *, bounds: bool = False) -> tuple[ReportData, list[Section]]:
    """Returns the data and the sections of a report.

    Results come first, then a section for each task; failures come last. Empty sections are left out.
    """
    data = ReportData(runs)
    sections = [
        Section("overview", "Overview", [Part("", [overview_table(data)])]),
        *(Section(f"task-{task.name}", task.label, _task_parts(data, task, bounds)) for task in data.tasks),
        Section("other-analyses", "Analyses without a run", analysis_parts(data, None, show_bounds=bounds)),
        Section("runs", "Runs", [Part("", [runs_table(data)])]),
        Section("machines", "Machines", [Part("", [machines_table(data)])]),
        Section("unfinished", "Failed and unfinished", [Part("", [unfinished_table(data)])]),
    ]
    shown = [replace(section, parts=_with_content(section.parts)) for section in sections]
    return data, [section for section in shown if section.parts]


def _task_parts(data: ReportData, task: Task, bounds: bool) -> list[Part]:
    analyses = analysis_parts(data, task, show_bounds=bounds)
    parts = [results_part(task), curves_part(task), sparsity_part(task), *analyses]
    if len(data.tasks) == 1:
        return parts
    # Names must be unique on the page and as files.
    return [
        replace(part, blocks=[replace(block, name=f"{task.name}-{block.name}") for block in part.blocks])
        for part in parts
    ]


def _with_content(parts: Iterable[Part]) -> list[Part]:
    """Remove empty tables, figures with single points (the tables show them better), and empty parts."""
    shown = [replace(part, blocks=[block for block in part.blocks if block.has_content]) for part in parts]
    return [part for part in shown if part.blocks or part.lead or part.notes]
