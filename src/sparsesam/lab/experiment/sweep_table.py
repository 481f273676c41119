"""A sweep's progress: a live table in a terminal, a line per run in a log, and when all will be done."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from sparsesam.lab.display import finished_of, percent, plural, ratio, significant
from sparsesam.lab.experiment.calibration import SweepCalibration
from sparsesam.lab.experiment.observers import duration
from sparsesam.lab.experiment.run_directory import RunDirectory, read_records
from sparsesam.lab.experiment.sweep import Job, Outcome


class SweepProgress:
    """What is shown of a sweep while it runs: a table, which ``draw`` makes from the runs' directories, and when all
    will be done, by the calibration at first, then by how fast the runs have been.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        draw: Callable[[], RenderableType],
        console: Console,
        *,
        workers: int,
        calibration: SweepCalibration | None,
    ) -> None:
        self.jobs = list({job.directory: job for job in jobs}.values())
        self.draw, self.console, self.workers, self.calibration = draw, console, workers, calibration
        self.warnings: Counter[str] = Counter()
        self.begun, self.work_before = time.monotonic(), self._work_left()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Within the block the table is drawn once a second, or in a log once at the end."""
        if self.console.is_terminal:
            with Live(get_renderable=self._view, console=self.console, refresh_per_second=1, redirect_stderr=False):
                yield
            return
        self._print(self._status())
        try:
            yield
        finally:
            self.console.print(self.draw())
            for line in self._warning_lines():
                self._print(line)

    def ended(self, outcome: Outcome) -> None:
        """A run has ended: a line in a log, and its warnings are collected."""
        self.warnings.update(outcome.warnings)
        if self.console.is_terminal:
            return
        job, result = outcome.job, outcome.job.result
        if result is not None:
            ending = f"test {result['test_accuracy']:.2%}, {duration(result['seconds'])} of training"
        else:
            ending = f"failed: {job.failure}" if outcome.status == "failed" else outcome.status
        self._print(f"{job.label}, seed {job.config.seed}: {ending}; {self._status()}")

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False)

    def _view(self) -> RenderableType:
        return Group(self.draw(), self._status(), *self._warning_lines())

    def _status(self) -> str:
        unfinished = sum(not job.is_finished for job in self.jobs)
        seconds = self._seconds_left(unfinished) if unfinished else None
        remaining = "" if seconds is None else f", about {duration(seconds)} remaining"
        return f"{len(self.jobs) - unfinished} of {plural(len(self.jobs), 'run')} finished{remaining}"

    def _seconds_left(self, unfinished: int) -> float | None:
        """None while nothing is known yet."""
        left = self._work_left()
        done = self.work_before - left
        if done > 0.05 * self.work_before:
            return left * (time.monotonic() - self.begun) / done
        return None if self.calibration is None else left / min(self.workers, unfinished)

    def _work_left(self) -> float:
        """In seconds of the calibration, or in epochs without one."""
        work = 0.0
        for job in self.jobs:
            if job.failure is None and not job.is_finished:
                seconds = self.calibration and self.calibration.seconds_per_epoch(job.config)
                work += (seconds or 1.0) * max(0, job.config.epochs - epochs_done(job))
        return work

    def _warning_lines(self) -> list[str]:
        return [f"warning ({plural(count, 'run')}): {text}" for text, count in self.warnings.items()]


def epochs_done(job: Job) -> int:
    try:
        records = read_records(RunDirectory(job.directory).records)
    except (OSError, ValueError):  # not begun, or being written
        return 0
    return sum(record["kind"] == "epoch" for record in records)


def sweep_table(title: str, jobs: Sequence[Job], calibration: SweepCalibration | None = None) -> Table:
    """A row for each variant: the means over its finished seeds, and the cost relative to the first variant's.

    Costs are times that were measured together, or forward and backward passes where there is no calibration.
    """
    variants: dict[str, list[Job]] = {}
    for job in jobs:
        variants.setdefault(job.label, []).append(job)
    results = {label: [found for job in members if (found := job.result)] for label, members in variants.items()}
    costs = {label: _cost(members[0], results[label], calibration) for label, members in variants.items()}
    first, unit = next(iter(costs.items()))
    table, measured = Table(title=title), "forward-backwards" if calibration is None else "time"
    for heading in ("", "test accuracy", f"{measured} / {first}", "sparsity", "seeds"):
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    for label, members in variants.items():
        finished, cost = results[label], costs[label]
        accuracies = [result["test_accuracy"] for result in finished]
        mean = statistics.fmean(accuracies) if accuracies else None
        deviation = statistics.stdev(accuracies) if len(accuracies) > 1 else None
        seeds = finished_of(len(finished), len(members), sum(job.failure is not None for job in members))
        table.add_row(
            label,
            percent(mean, deviation),
            ratio(cost / unit if cost and unit else None),
            significant(finished[0]["sparsity"] if finished else None),
            ", ".join([seeds, *_running(members)]),
        )
    return table


def _cost(job: Job, results: Sequence[Mapping[str, Any]], calibration: SweepCalibration | None) -> float | None:
    if calibration is not None:
        return calibration.seconds_per_epoch(job.config)
    passes = [result["forward_backwards_per_step"] for result in results]
    return statistics.fmean(passes) if passes else None


def _running(members: Sequence[Job]) -> list[str]:
    """How far the runs that are running have come."""
    running = [job for job in members if (job.directory / "running.json").exists()]
    return [f"in epoch {epochs_done(job) + 1}/{job.config.epochs}" for job in running]
