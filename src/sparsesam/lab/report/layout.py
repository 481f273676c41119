"""The order of the page: results first, failures last."""

from __future__ import annotations

from dataclasses import replace

from sparsesam.lab.display import Table
from sparsesam.lab.inspection import ANALYSES
from sparsesam.lab.report.data import ReportData, Section
from sparsesam.lab.report.sections.analyses import analysis_parts, other_analyses
from sparsesam.lab.report.sections.curves import curves_part
from sparsesam.lab.report.sections.paper import beside_the_paper
from sparsesam.lab.report.sections.results import overview, results_part, sparsity_part
from sparsesam.lab.report.sections.runs import all_runs, not_finished, where_and_how
from sparsesam.lab.report.variants import Task


def build_sections(data: ReportData) -> list[Section]:
    """One section for each task, between the overview and what concerns all of them; empty ones are left out."""
    tasks = [_task_section(data, task) for task in data.tasks]
    others = (beside_the_paper(data), other_analyses(data), all_runs(data), where_and_how(data), not_finished(data))
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
