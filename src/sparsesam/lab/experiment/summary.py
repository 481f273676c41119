"""From the runs of a sweep to the numbers of its table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsesam.lab.experiment.calibration import SweepCalibration
from sparsesam.lab.experiment.progress import epochs_done
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
