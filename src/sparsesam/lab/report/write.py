"""Reads the records of runs, builds the sections, and writes the page."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from sparsesam.lab.display import make_parent, write_plot
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.experiment.run_directory import write_atomically
from sparsesam.lab.report import sections
from sparsesam.lab.report.page import Part, Section, render
from sparsesam.lab.report.tasks import ReportData, Task

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
    for figure in [figure for section in shown for figure in section.figures] if figures is not None else []:
        files = [Path(figures or "", f"{figure.name}.{suffix}") for suffix in ("svg", "pdf")]
        make_parent("--figures", files[0])
        write_plot([figure], *files)
    return data


def build_report(runs: Iterable[StrPath]) -> tuple[ReportData, list[Section]]:
    """Returns the data and the sections of a report.

    Each task has a section; runs and machines come last. Empty sections are left out.
    """
    data = ReportData(runs)
    built = [
        *(Section(task.name, task.label, _task_parts(data, task)) for task in data.tasks),
        Section("other-analyses", "Analyses without a run", sections.analysis_parts(data, None)),
        Section("runs", "Runs", [sections.runs_part(data)]),
        Section("machines", "Machines", [Part("", [sections.machines_table(data)])]),
    ]
    shown = [replace(section, parts=_with_content(section.parts)) for section in built]
    return data, [section for section in shown if section.parts]


def _task_parts(data: ReportData, task: Task) -> list[Part]:
    parts = [
        sections.results_part(task),
        sections.curves_part(task),
        sections.sparsity_part(task),
        *sections.analysis_parts(data, task),
    ]
    if len(data.tasks) == 1:
        return parts
    # Names must be unique on the page.
    return [
        replace(part, blocks=[replace(block, name=f"{task.name}-{block.name}") for block in part.blocks])
        for part in parts
    ]


def _with_content(parts: Iterable[Part]) -> list[Part]:
    """Remove empty tables, figures with single points (the tables show them better), and empty parts."""
    shown = [replace(part, blocks=[block for block in part.blocks if block.has_content]) for part in parts]
    return [part for part in shown if part.blocks or part.lead or part.notes]
