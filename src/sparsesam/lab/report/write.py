"""From the directories of runs to the page: read the records, build the sections, write."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from sparsesam.lab.display import Table, write_figures
from sparsesam.lab.experiment.calibration import SweepCalibration, read_calibration
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.experiment.run_directory import write_atomically
from sparsesam.lab.report.data import ReportData, Section
from sparsesam.lab.report.page import render
from sparsesam.lab.report.read_run import RunRecord, find_runs, read_run
from sparsesam.lab.report.sections.analyses import analysis_parts, other_analyses_section
from sparsesam.lab.report.sections.curves import curves_part
from sparsesam.lab.report.sections.paper import paper_section
from sparsesam.lab.report.sections.results import overview_section, results_part, sparsity_part
from sparsesam.lab.report.sections.runs import provenance_section, runs_section, unfinished_section
from sparsesam.lab.report.variants import Task, group_runs

StrPath = str | os.PathLike[str]


def write_report(
    runs: Iterable[StrPath],
    out: StrPath = "report.html",
    *,
    title: str = "sparsesam report",
    figures: StrPath | None = None,
    bounds: bool = False,
) -> ReportData:
    """One page about all runs at or below ``runs``, and with ``figures`` each figure as files in that directory.

    ``bounds`` shows generalization bounds even if they are vacuous.
    """
    out = Path(out)
    if out.is_dir():
        raise ValueError(f"out must be a file such as report.html, got the directory {str(out)!r}")
    data, sections = build_report(runs, bounds=bounds)
    made = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M UTC}, {provenance()['command']}"
    page = render(title, made, sections, data)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    if figures is not None:
        write_figures([figure for section in sections for figure in section.figures], Path(figures))
    return data


def build_report(runs: Iterable[StrPath], *, bounds: bool = False) -> tuple[ReportData, list[Section]]:
    """What was read, and the sections made of it."""
    records = [read_run(path) for path in find_runs(runs)]
    problems: list[tuple[str, str]] = []
    calibrations = read_calibrations(records, problems)
    data = ReportData(records, group_runs(records), calibrations, show_bounds=bounds, problems=problems)
    return data, _build_sections(data)


def _build_sections(data: ReportData) -> list[Section]:
    """Results first, failures last, and a section for each task in between; empty ones are left out."""
    tasks = [_task_section(data, task) for task in data.tasks]
    others = (paper_section, other_analyses_section, runs_section, provenance_section, unfinished_section)
    sections = [overview_section(data), *tasks, *(section(data) for section in others)]
    return [section for section in map(_with_content, sections) if section.parts]


def _task_section(data: ReportData, task: Task) -> Section:
    parts = [results_part(data, task), curves_part(task), sparsity_part(task), *analysis_parts(data, task)]
    if len(data.tasks) > 1:
        for place, part in enumerate(parts):  # names are unique on the page, and as files
            blocks = [replace(block, name=f"{task.name}-{block.name}") for block in part.blocks]
            parts[place] = replace(part, blocks=blocks)
    return Section(f"task-{task.name}", task.label, parts)


def _with_content(section: Section) -> Section:
    """Without figures of single points, which the tables show better, and without empty parts."""
    parts = [
        replace(part, blocks=[block for block in part.blocks if isinstance(block, Table) or block.has_content])
        for part in section.parts
    ]
    return replace(section, parts=[part for part in parts if not part.is_empty])


def read_calibrations(runs: Iterable[RunRecord], problems: list[tuple[str, str]]) -> list[SweepCalibration]:
    """Those beside the runs; files that cannot be read are noted as problems."""
    found = []
    for folder in dict.fromkeys(run.path.resolve().parent for run in runs):
        try:
            found.append(read_calibration(folder))
        except (OSError, ValueError) as error:
            problems.append((str(folder), str(error)))
    return [one for one in found if one is not None]
