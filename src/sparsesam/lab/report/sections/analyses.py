"""What `sparsesam analyze` measured, by each analysis's own table and figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsesam.lab.display import Figure, Table
from sparsesam.lab.inspection import ANALYSES, Analysis, Measured
from sparsesam.lab.inspection.bound import BoundAnalysis
from sparsesam.lab.report.data import Part, ReportData, Section
from sparsesam.lab.report.variants import Task

Find = Callable[[type[Analysis[Any]], str], list[Measured[Any]]]


def analysis_parts(data: ReportData, task: Task) -> list[Part]:
    """One part for each analysis of the task's runs."""
    return _parts(data, lambda analysis, name: data.measured(analysis, name, task))


def other_analyses_section(data: ReportData) -> Section:
    """Results in directories without a run."""
    parts = [part for part in _parts(data, data.measured_without_task) if not part.is_empty]
    return Section("other-analyses", "Analyses without a run", parts)


def missing_analyses(data: ReportData) -> list[str]:
    """The analyses that no run has, as commands."""
    present = {name for run in data.runs for name in run.analyses}
    return [
        f"sparsesam analyze {kind} {analysis.argument[0]}"
        for kind, analysis in ANALYSES.items()
        if not present.intersection(analysis.files)
    ]


def _parts(data: ReportData, find: Find) -> list[Part]:
    parts = []
    for analysis in ANALYSES.values():
        found = {name: measured for name in analysis.files if (measured := find(analysis, name))}
        if not found:
            continue
        everything = [one for measured in found.values() for one in measured]
        vacuous = BoundAnalysis.all_vacuous(everything) if analysis is BoundAnalysis else ""
        if vacuous and not data.show_bounds:
            parts.append(Part("", notes=[f"{vacuous} The option --bounds of sparsesam report shows the terms."]))
            continue
        blocks: list[Table | Figure] = []
        for name, measured in found.items():
            blocks += [analysis.table(name, measured), *analysis.figures(name, measured)]
        parts.append(Part(analysis.title, blocks, notes=analysis.notes(everything)))
    return parts
