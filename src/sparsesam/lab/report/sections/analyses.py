"""The results of `sparsesam analyze`, as the table and figures of each analysis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsesam.lab.display import Figure, SeriesStyle, Table
from sparsesam.lab.inspection import ANALYSES, Analysis, LabeledResult
from sparsesam.lab.report.page import Part
from sparsesam.lab.report.tasks import ReportData, Task


def analysis_parts(data: ReportData, task: Task | None, *, show_bounds: bool) -> list[Part]:
    """Returns one part for each analysis of the task's runs, or of directories without a run."""
    parts = []
    for analysis in ANALYSES.values():
        found = {name: results for name in analysis.files if (results := _read_results(data, analysis, name, task))}
        if not found:
            continue
        everything = [result for results in found.values() for result in results]
        if (reason := analysis.why_hidden(everything)) and not show_bounds:
            parts.append(Part("", notes=[reason]))
            continue
        blocks: list[Table | Figure] = []
        for name, results in found.items():
            blocks += [analysis.table(name, results), *analysis.figures(name, results)]
        parts.append(Part(analysis.title, blocks, notes=analysis.notes(everything)))
    return parts


def _read_results(
    data: ReportData, analysis: type[Analysis[Any]], name: str, task: Task | None
) -> list[LabeledResult[Any]]:
    """Read the results of an analysis in the runs of a task, or in directories without settings.

    Files in another format are noted as problems.
    """
    runs = task.runs if task else [run for run in data.directories if run.config is None]
    having = [run for run in runs if name in run.analyses]
    found = []
    for run in having:
        try:
            result = analysis.result_type.from_dict(run.analyses[name]["result"])
            other = run.analyses[name]["made"].get("other")
        except (KeyError, ValueError) as error:
            problem = f"analyses/{name}.json is not in the format of docs/analyze.md: {error}"
            data.problems.append((str(run.path), problem))
            continue
        label, style = run.path.name, SeriesStyle()
        if task is not None:
            variant = task.variant_of(run)
            label, seeds = task.label_of(run, having), [other for other in having if other in variant.runs]
            number = variant.style.variant + len(task.variants) * seeds.index(run)
            style = variant.style._replace(variant=number)
        found.append(LabeledResult(label, result, style, _label_at(data, Path(other)) if other else ""))
    return found


def _label_at(data: ReportData, directory: Path) -> str:
    """Returns the label of the run in that directory, or the directory's name if it is not in this report."""
    found = [(task, run) for task in data.tasks for run in task.runs if run.path.resolve() == directory.resolve()]
    return next((task.label_of(run, task.runs) for task, run in found), directory.name)
