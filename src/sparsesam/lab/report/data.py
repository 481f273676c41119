"""All that a report is made from, and what its page is made of: sections of parts, each with tables and figures."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsesam.lab.display import Figure, SeriesStyle, Table, plural
from sparsesam.lab.display.figure import PALETTE_SIZE
from sparsesam.lab.experiment.calibration import SweepCalibration, read_calibration
from sparsesam.lab.inspection import Analysis, Measured
from sparsesam.lab.inspection.trained_run import Origin
from sparsesam.lab.report.cost import VariantCosts, cost_of
from sparsesam.lab.report.read_run import RunRecord, find_runs
from sparsesam.lab.report.variants import Task, group_runs


class ReportData:
    """``directories`` without settings, which are in no task, may have analyses. ``calibrations`` are the times that
    sweeps measured. ``problems`` are (directory, what could not be read), and grow while sections are built.
    """

    def __init__(self, places: Iterable[str | os.PathLike[str]]) -> None:
        self.directories = [RunRecord(path) for path in find_runs(places)]
        self.tasks = group_runs(self.directories)
        self.problems = [(str(run.path), one) for run in self.directories for one in run.problems]
        self.calibrations: list[SweepCalibration] = []
        for folder in dict.fromkeys(run.path.resolve().parent for run in self.directories):
            try:
                calibration = read_calibration(folder)
            except (OSError, ValueError) as error:
                self.problems.append((str(folder), str(error)))
                continue
            self.calibrations += [calibration] if calibration else []

    @property
    def runs(self) -> list[RunRecord]:
        return [run for run in self.directories if run.status != "analyses only"]

    def cost_of(self, task: Task) -> VariantCosts:
        return cost_of(task, self.calibrations)

    def count(self) -> str:
        statuses = [run.status for run in self.runs]
        known = [one for one in ("finished", "failed", "unfinished") if one in statuses]
        counts = ", ".join(f"{statuses.count(one)} {one}" for one in known)
        return f"{plural(len(statuses), 'run')}: {counts}" if statuses else "no runs, analyses only"

    def measured(self, analysis: type[Analysis[Any]], name: str, task: Task | None) -> list[Measured[Any]]:
        """The results of an analysis in the runs of a task, or in directories without settings.

        Files in another format are noted as problems.
        """
        runs = task.runs if task else [run for run in self.directories if run.config is None]
        having = [run for run in runs if name in run.analyses]
        found = []
        for run in having:
            try:
                result = analysis.read(run.analyses[name]["result"])
                other = Origin.from_dict(run.analyses[name]["made"]).other
            except (KeyError, ValueError) as error:
                problem = f"analyses/{name}.json is not in the format of docs/analyze.md: {error}"
                self.problems.append((str(run.path), problem))
                continue
            label, style = run.path.name, SeriesStyle()
            if task is not None:
                variant = task.variant_of(run)
                label, place = variant.label_of(run, having), [one for one in having if one in variant.runs].index(run)
                style = variant.style._replace(number=variant.style.number + PALETTE_SIZE * place)
            found.append(Measured(label, result, style, self._label_at(other) if other else ""))
        return found

    def _label_at(self, directory: str) -> str:
        """The label of the run in that directory, or the directory's name if it is not in this report."""
        for task in self.tasks:
            for run in task.runs:
                if run.path.resolve() == Path(directory).resolve():
                    return task.variant_of(run).label_of(run, task.runs)
        return Path(directory).name


@dataclass(frozen=True)
class Part:
    """``lead`` is a sentence above everything else, ``notes`` are below the tables."""

    title: str
    blocks: Sequence[Table | Figure] = ()
    lead: str = ""
    notes: Sequence[str] = ()

    @property
    def groups(self) -> list[list[Table | Figure]]:
        """Blocks in order; figures that follow each other are together, to be shown side by side."""
        return [list(group) for _, group in itertools.groupby(self.blocks, lambda block: isinstance(block, Figure))]


@dataclass(frozen=True)
class Section:
    """``name`` is unique on the page."""

    name: str
    title: str
    parts: Sequence[Part]

    @property
    def figures(self) -> list[Figure]:
        return [block for part in self.parts for block in part.blocks if isinstance(block, Figure)]
