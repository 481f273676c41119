"""Read, build, write."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path

from sparsesam.lab.display.drawing import write_figures
from sparsesam.lab.report.calibration import read_calibrations
from sparsesam.lab.report.data import ReportData
from sparsesam.lab.report.find_runs import find_runs
from sparsesam.lab.report.layout import build_sections
from sparsesam.lab.report.page import render
from sparsesam.lab.report.read_run import read_run
from sparsesam.lab.report.section import Section
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
    data, sections = build(runs, bounds=bounds)
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC") + (f", {command}" if command else "")
    page = render(title, made, sections, data)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")
    # The name of a directory may hold bytes that are not text.
    part.write_text(page, encoding="utf-8", errors="replace")
    part.replace(out)
    if figures is not None:
        write_figures([figure for section in sections for figure in section.figures], Path(figures))
    return data


def build(runs: Iterable[StrPath], *, bounds: bool = False) -> tuple[ReportData, list[Section]]:
    """What was read, and the sections made of it."""
    records = [read_run(path) for path in find_runs(runs)]
    problems: list[tuple[str, str]] = []
    calibrations = read_calibrations((run.path for run in records), problems)
    labels = {key: label for calibration in calibrations for key, label in calibration.labels.items()}
    data = ReportData(records, group_runs(records, labels), calibrations, show_bounds=bounds, problems=problems)
    return data, build_sections(data)
