"""All that a report is made from, and what its page is made of: sections of parts, each with tables and figures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsesam.lab.display import PALETTE_SIZE, Figure, SeriesStyle, Table, plural
from sparsesam.lab.experiment.calibration import SweepCalibration
from sparsesam.lab.inspection import Analysis, Measured
from sparsesam.lab.inspection.trained_run import Origin
from sparsesam.lab.report.cost import VariantCosts, cost_of
from sparsesam.lab.report.read_run import RunRecord
from sparsesam.lab.report.variants import Task


@dataclass
class ReportData:
    """``calibrations`` are the times that sweeps measured. ``problems`` are (directory, what could
    not be read), and grow while sections are built.

    ``show_bounds``: vacuous generalization bounds too.
    """

    runs: list[RunRecord]
    tasks: list[Task]
    calibrations: list[SweepCalibration] = field(default_factory=list)
    show_bounds: bool = False
    problems: list[tuple[str, str]] = field(default_factory=list)

    def cost_of(self, task: Task) -> VariantCosts:
        return cost_of(task, self.calibrations)

    def measured(self, analysis: type[Analysis[Any]], name: str, task: Task) -> list[Measured[Any]]:
        """The results of an analysis in the runs of a task; files in another format are noted as problems."""
        having = [run for run in task.runs if name in run.analyses]
        found = []
        seen: dict[str, int] = {}
        for run in having:
            variant = task.variant_of(run)
            read = self._read(analysis, name, run)
            if read is not None:
                result, other = read
                color, number = variant.style
                style = SeriesStyle(color, number + PALETTE_SIZE * seen.get(variant.label, 0))
                seen[variant.label] = seen.get(variant.label, 0) + 1
                found.append(Measured(variant.label_of(run, having), result, style, other))
        return found

    def measured_without_task(self, analysis: type[Analysis[Any]], name: str) -> list[Measured[Any]]:
        """Results in directories without a run."""
        directories = [run for run in self.runs if name in run.analyses and run.config is None]
        read = [(run, self._read(analysis, name, run)) for run in directories]
        return [Measured(run.path.name, one[0], other=one[1]) for run, one in read if one is not None]

    def count(self) -> str:
        runs = [run for run in self.runs if run.status != "analyses only"]
        parts = [
            f"{count} {status}"
            for status in ("finished", "failed", "unfinished")
            if (count := sum(run.status == status for run in runs))
        ]
        return f"{plural(len(runs), 'run')}: {', '.join(parts)}" if runs else "no runs, analyses only"

    def not_finished(self) -> Sequence[RunRecord]:
        return [run for run in self.runs if run.status in ("failed", "unfinished")]

    def _read(self, analysis: type[Analysis[Any]], name: str, run: RunRecord) -> tuple[Any, str] | None:
        content = run.analyses[name]
        try:
            result, origin = analysis.read(content["result"]), Origin.from_dict(content["made"])
        except (KeyError, ValueError) as error:
            problem = f"analyses/{name}.json is not in the format of docs/analyze.md: {error}"
            if (str(run.path), problem) not in self.problems:
                self.problems.append((str(run.path), problem))
            return None
        return result, "" if origin.other is None else self._label_at(origin.other)

    def _label_at(self, directory: str) -> str:
        """The label of the run in that directory, or the directory's name if it is not in this report."""
        path = Path(directory)
        for task in self.tasks:
            for run in task.runs:
                if run.path.resolve() == path.resolve():
                    return task.variant_of(run).label_of(run, task.runs)
        return path.name


@dataclass(frozen=True)
class Part:
    """``lead`` is a sentence above everything else, ``notes`` are below the tables."""

    title: str
    blocks: Sequence[Table | Figure] = ()
    lead: str = ""
    notes: Sequence[str] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.blocks or self.lead or self.notes)

    @property
    def groups(self) -> list[list[Table | Figure]]:
        """Blocks in order; figures that follow each other are together, to be shown side by side."""
        return [list(group) for _, group in itertools.groupby(self.blocks, lambda block: isinstance(block, Figure))]


@dataclass(frozen=True)
class Section:
    """``name`` is unique on the page. A section without parts is left out."""

    name: str
    title: str
    parts: Sequence[Part]

    @property
    def figures(self) -> list[Figure]:
        return [block for part in self.parts for block in part.blocks if isinstance(block, Figure)]
