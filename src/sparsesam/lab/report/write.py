"""Read, build, write."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path

from sparsesam.lab.display import write_figures
from sparsesam.lab.experiment.calibration import SweepCalibration, read_calibration
from sparsesam.lab.experiment.run_directory import write_whole
from sparsesam.lab.report.data import ReportData, Section
from sparsesam.lab.report.files import find_runs
from sparsesam.lab.report.layout import build_sections
from sparsesam.lab.report.page import render
from sparsesam.lab.report.read_run import RunRecord, read_run
from sparsesam.lab.report.variants import group_runs

StrPath = str | os.PathLike[str]


def write_report(
    runs: Iterable[StrPath],
    out: StrPath = "report.html",
    *,
    title: str = "sparsesam report",
    figures: StrPath | None = None,
    bounds: bool = False,
    command: str = "",
) -> ReportData:
    """One page about all runs at or below ``runs``, and with ``figures`` each figure as files in that directory.

    ``bounds`` shows generalization bounds even if they are vacuous.
    """
    out = Path(out)
    if out.is_dir():
        raise ValueError(f"out must be a file such as report.html, got the directory {str(out)!r}")
    data, sections = build_report(runs, bounds=bounds)
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC") + (f", {command}" if command else "")
    page = render(title, made, sections, data)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page)
    if figures is not None:
        write_figures([figure for section in sections for figure in section.figures], Path(figures))
    return data


def build_report(runs: Iterable[StrPath], *, bounds: bool = False) -> tuple[ReportData, list[Section]]:
    """What was read, and the sections made of it."""
    records = [read_run(path) for path in find_runs(runs)]
    problems: list[tuple[str, str]] = []
    calibrations = read_calibrations(records, problems)
    data = ReportData(records, group_runs(records), calibrations, show_bounds=bounds, problems=problems)
    return data, build_sections(data)


def read_calibrations(runs: Iterable[RunRecord], problems: list[tuple[str, str]]) -> list[SweepCalibration]:
    """Those beside the runs; files that cannot be read are noted as problems."""
    found = []
    for folder in dict.fromkeys(run.path.resolve().parent for run in runs):
        try:
            found.append(read_calibration(folder))
        except (OSError, ValueError) as error:
            problems.append((str(folder), str(error)))
    return [one for one in found if one is not None]
