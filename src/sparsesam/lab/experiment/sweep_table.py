"""A sweep's progress: a live table in a terminal, a line per run in a log."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from sparsesam.lab.display.numbers import plural
from sparsesam.lab.experiment.calibration import SweepCalibration
from sparsesam.lab.experiment.execution import Outcome
from sparsesam.lab.experiment.observers import duration
from sparsesam.lab.experiment.progress import Remaining, epochs_done
from sparsesam.lab.experiment.sweep import Job


@dataclass(frozen=True)
class Row:
    """One variant over its seeds; numbers are of the finished ones. ``deviation`` is the sample standard deviation.

    ``relative_cost`` is that of a step in units of the first row's: of times that were measured together, or of
    forward and backward passes where there is no calibration.
    """

    label: str
    seeds: int
    finished: int
    failed: int
    accuracy: float | None
    deviation: float | None
    relative_cost: float | None
    sparsity: float | None
    now: str


def summarize(jobs: Sequence[Job], calibration: SweepCalibration | None = None) -> list[Row]:
    """A row per variant, in the order they appear."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.label, []).append(job)
    costs = [_cost(members, calibration) for members in groups.values()]
    return [
        _row(label, members, None if cost is None or not costs[0] else cost / costs[0])
        for (label, members), cost in zip(groups.items(), costs, strict=True)
    ]


def _row(label: str, members: Sequence[Job], relative_cost: float | None) -> Row:
    results = _results(members)
    accuracies = [result["test_accuracy"] for result in results]
    return Row(
        label=label,
        seeds=len(members),
        finished=len(results),
        failed=sum(job.failure is not None for job in members),
        accuracy=statistics.fmean(accuracies) if accuracies else None,
        deviation=statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        relative_cost=relative_cost,
        sparsity=results[0]["sparsity"] if results else None,
        now=_now(members),
    )


def _cost(members: Sequence[Job], calibration: SweepCalibration | None) -> float | None:
    if calibration is not None:
        measured = calibration.of(members[0].config)
        return None if measured is None else measured.seconds_per_epoch
    passes = [result["forward_backwards_per_step"] for result in _results(members)]
    return statistics.fmean(passes) if passes else None


def _results(members: Sequence[Job]) -> list[dict[str, Any]]:
    return [result for job in members if (result := job.result) is not None]


def _now(members: Sequence[Job]) -> str:
    """How far the runs that are running have come."""
    running = [job for job in members if (job.directory / "running.json").exists()]
    return ", ".join(f"epoch {epochs_done(job)}/{job.config.epochs}" for job in running)


class SweepProgress:
    """What is shown of a sweep while it runs. ``draw`` makes its table from the runs' directories."""

    def __init__(
        self, jobs: Sequence[Job], draw: Callable[[], RenderableType], remaining: Remaining, console: Console
    ) -> None:
        self.jobs, self.draw, self.remaining, self.console = jobs, draw, remaining, console
        self.warnings: dict[str, int] = {}

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Within the block the table is drawn once a second, or in a log once at the end."""
        if self.console.is_terminal:
            with Live(get_renderable=self._view, console=self.console, refresh_per_second=1, redirect_stderr=False):
                yield
            return
        self.console.print(self._status(), soft_wrap=True)
        try:
            yield
        finally:
            self.console.print(self.draw())
            for line in self._warning_lines():
                self.console.print(line, soft_wrap=True, markup=False)

    def ended(self, outcome: Outcome) -> None:
        """A run has ended: a line in a log, and its warnings are collected."""
        for text in outcome.warnings:
            self.warnings[text] = self.warnings.get(text, 0) + 1
        if self.console.is_terminal:
            return
        job, result = outcome.job, outcome.job.result
        if result is not None:
            ending = f"test {result['test_accuracy']:.2%}, {duration(result['seconds'])} of training"
        else:
            ending = f"failed: {job.failure}" if outcome.status == "failed" else outcome.status
        line = f"{job.label}, seed {job.config.seed}: {ending}; {self._status()}"
        self.console.print(line, soft_wrap=True, markup=False)

    def _view(self) -> RenderableType:
        return Group(self.draw(), self._status(), *self._warning_lines())

    def _status(self) -> str:
        directories = {job.directory: job for job in self.jobs}
        done = sum(job.is_finished for job in directories.values())
        seconds = self.remaining.seconds()
        left = "" if seconds is None or done == len(directories) else f", about {duration(seconds)} remaining"
        return f"{done} of {plural(len(directories), 'run')} finished{left}"

    def _warning_lines(self) -> list[str]:
        return [f"warning ({plural(count, 'run')}): {text}" for text, count in self.warnings.items()]


def table(title: str, jobs: Sequence[Job], calibration: SweepCalibration | None = None) -> Table:
    """The current state of the runs in these directories."""
    rows = summarize(jobs, calibration)
    unit = "forward-backwards" if calibration is None else "time"
    drawn = Table(title=title)
    drawn.add_column("")
    for heading in ("test accuracy", f"{unit} / {rows[0].label}", "sparsity", "seeds"):
        drawn.add_column(heading, justify="right")
    is_running = any(row.now for row in rows)
    if is_running:
        drawn.add_column("now")
    for row in rows:
        cells = [
            row.label,
            mean_and_deviation(row.accuracy, row.deviation),
            "–" if row.relative_cost is None else f"{row.relative_cost:.2f}",
            "–" if row.sparsity is None else f"{row.sparsity:.4g}",
            _seeds(row),
        ]
        drawn.add_row(*cells, *([row.now] if is_running else []))
    return drawn


def mean_and_deviation(mean: float | None, deviation: float | None) -> str:
    """Fractions as percentages."""
    if mean is None:
        return "–"
    return f"{100 * mean:.2f}{'' if deviation is None else f' ± {100 * deviation:.2f}'} %"


def _seeds(row: Row) -> str:
    done = str(row.seeds) if row.finished == row.seeds else f"{row.finished} of {row.seeds}"
    return f"{done}, {row.failed} failed" if row.failed else done
