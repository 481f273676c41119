"""What `sparsesam analyze` measured, by each analysis's own table and figures."""

from __future__ import annotations

from sparsesam.lab.display import Figure, Table
from sparsesam.lab.inspection import ANALYSES
from sparsesam.lab.inspection.theorems import BoundAnalysis
from sparsesam.lab.report.data import Part, ReportData
from sparsesam.lab.report.variants import Task


def analysis_parts(data: ReportData, task: Task | None, *, show_bounds: bool) -> list[Part]:
    """One part for each analysis of the task's runs, or of directories without a run."""
    parts = []
    for analysis in ANALYSES.values():
        found = {name: measured for name in analysis.files if (measured := data.measured(analysis, name, task))}
        if not found:
            continue
        everything = [one for measured in found.values() for one in measured]
        vacuous = BoundAnalysis.all_vacuous(everything) if analysis is BoundAnalysis else ""
        if vacuous and not show_bounds:
            parts.append(Part("", notes=[f"{vacuous} The option --bounds of sparsesam report shows the terms."]))
            continue
        blocks: list[Table | Figure] = []
        for name, measured in found.items():
            blocks += [analysis.table(name, measured), *analysis.figures(name, measured)]
        parts.append(Part(analysis.title, blocks, notes=analysis.notes(everything)))
    return parts


def missing_analyses(data: ReportData) -> list[str]:
    """The analyses that no run has, as commands."""
    present = {name for run in data.directories for name in run.analyses}
    return [
        f"sparsesam analyze {kind} {analysis.argument[0]}"
        for kind, analysis in ANALYSES.items()
        if not present.intersection(analysis.files)
    ]
