"""The order of the page: results first, failures last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sparsesam.lab.display import Figure, Table
from sparsesam.lab.inspection import ANALYSES
from sparsesam.lab.report.data import Part, ReportData, Section
from sparsesam.lab.report.sections.analyses import analysis_parts, other_analyses
from sparsesam.lab.report.sections.curves import curves_part
from sparsesam.lab.report.sections.paper import beside_the_paper
from sparsesam.lab.report.sections.results import overview, results_part, sparsity_part
from sparsesam.lab.report.sections.runs import all_runs, not_finished, provenance
from sparsesam.lab.report.variants import Task


def build_sections(data: ReportData) -> list[Section]:
    """One section for each task, between the overview and what concerns all of them; empty ones are left out."""
    tasks = [_task_section(data, task) for task in data.tasks]
    others = (beside_the_paper(data), other_analyses(data), all_runs(data), provenance(data), not_finished(data))
    return [section for section in map(_with_content, (overview(data), *tasks, *others)) if section.parts]


def missing_analyses(data: ReportData) -> list[str]:
    """The analyses that no run has, as commands."""
    present = {name for run in data.runs for name in run.analyses}
    return [
        f"sparsesam analyze {kind} {analysis.argument[0]}"
        for kind, analysis in ANALYSES.items()
        if not present.intersection(analysis.files)
    ]


def _task_section(data: ReportData, task: Task) -> Section:
    parts = [results_part(data, task), curves_part(task), sparsity_part(task), *analysis_parts(data, task)]
    if len(data.tasks) > 1:
        parts = [replace(part, blocks=[_renamed(block, task) for block in part.blocks]) for part in parts]
    return Section(f"task-{task.name}", task.label, parts)


def _renamed(block: Table | Figure, task: Task) -> Table | Figure:
    """Names are unique on the page, and as files."""
    return replace(block, name=f"{task.name}-{block.name}")


def _with_content(section: Section) -> Section:
    """Without figures of single points, which the tables show better, and without empty parts."""
    parts = [replace(part, blocks=list(_drawn(part))) for part in section.parts]
    return replace(section, parts=[part for part in parts if not part.is_empty])


def _drawn(part: Part) -> Iterator[Table | Figure]:
    for block in part.blocks:
        if isinstance(block, Table) or block.has_content:
            yield block
