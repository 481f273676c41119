"""Read, build, write."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path

from sparsesam.lab.report.figure import Figure
from sparsesam.lab.report.figure_files import write_figures
from sparsesam.lab.report.find_runs import find_runs
from sparsesam.lab.report.page import render
from sparsesam.lab.report.read_run import read_run
from sparsesam.lab.report.section import ReportData, Section
from sparsesam.lab.report.sections import ORDER
from sparsesam.lab.report.variants import group

StrPath = str | os.PathLike[str]


def write_report(
    runs: Iterable[StrPath],
    out: StrPath = "report.html",
    *,
    title: str = "sparsesam report",
    figures: StrPath | None = None,
    command: str = "",
) -> ReportData:
    """One page about all runs at or below ``runs``, and with ``figures`` each figure as files in that directory."""
    out = Path(out)
    if out.is_dir():
        raise ValueError(f"out must be a file such as report.html, got the directory {str(out)!r}")
    material, sections = build(runs)
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC") + (f", {command}" if command else "")
    page = render(title, made, sections, material)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")
    # A directory's name may hold bytes that are no text.
    part.write_text(page, encoding="utf-8", errors="replace")
    part.replace(out)
    if figures is not None:
        write_figures([one for section in sections for one in section.blocks if isinstance(one, Figure)], Path(figures))
    return material


def build(runs: Iterable[StrPath]) -> tuple[ReportData, list[Section]]:
    """What was read, and the sections made of it."""
    read = [read_run(path) for path in find_runs(runs)]
    material = ReportData(read, group(read))
    return material, [section.build(material) for section in ORDER]
