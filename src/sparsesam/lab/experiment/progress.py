"""How far a sweep is, and when it will be done."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sparsesam.lab.experiment.calibration import SweepCalibration
from sparsesam.lab.experiment.records import read_records
from sparsesam.lab.experiment.run_directory import RunDirectory
from sparsesam.lab.experiment.sweep import Job


class Remaining:
    """The seconds that a sweep will still take, from its calibration or from the runs that have ended.

    A run's predicted time is its share of the work; how fast the work really goes is measured as it goes.
    """

    def __init__(self, jobs: Sequence[Job], workers: int, calibration: SweepCalibration | None) -> None:
        self.jobs = {job.directory: job for job in jobs}
        self.workers, self.calibration = workers, calibration
        self.begun, self.work_before = time.monotonic(), self.work_left()

    def seconds(self) -> float | None:
        """None while nothing is known yet."""
        left, elapsed = self.work_left(), time.monotonic() - self.begun
        done = self.work_before - left
        if done > 0.05 * self.work_before:
            return left * elapsed / done
        if self.calibration is None:
            return None
        unfinished = sum(not job.is_finished for job in self.jobs.values())
        return left / max(1, min(self.workers, unfinished))

    def work_left(self) -> float:
        return sum(self._work(job) * (1 - finished_share(job)) for job in self.jobs.values() if job.failure is None)

    def _work(self, job: Job) -> float:
        measured = None if self.calibration is None else self.calibration.of(job.config)
        if measured is not None:
            return measured.seconds_per_epoch * job.config.epochs
        return float(job.config.epochs)


def finished_share(job: Job) -> float:
    if job.is_finished:
        return 1.0
    return min(1.0, epochs_done(job) / job.config.epochs)


def epochs_done(job: Job) -> int:
    try:
        records = read_records(RunDirectory(job.directory).records)
    except (OSError, ValueError):  # not begun, or being written
        return 0
    return sum(record["kind"] == "epoch" for record in records)
