"""From the runs of a sweep to the numbers of its table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsesam.lab.experiment.records import read_records
from sparsesam.lab.experiment.run_directory import RunDirectory
from sparsesam.lab.experiment.sweep import Job


@dataclass(frozen=True)
class Row:
    """One variant over its seeds; numbers are of the finished ones. ``spread`` is the sample standard deviation."""

    label: str
    seeds: int
    finished: int
    failed: int
    accuracy: float | None
    spread: float | None
    relative_time: float | None
    sparsity: float | None
    now: str


def summarize(jobs: Sequence[Job]) -> list[Row]:
    """A row per variant, in the order they appear; times are relative to the first."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.label, []).append(job)
    rows: list[Row] = []
    reference: float | None = None
    for label, members in groups.items():
        results = [result for job in members if (result := job.result) is not None]
        accuracies = [result["test_accuracy"] for result in results]
        # A median over epochs and seeds: whatever else the machine did for a while does not count.
        seconds = statistics.median(result["seconds_per_epoch"] for result in results) if results else None
        if not rows:
            reference = seconds
        rows.append(
            Row(
                label=label,
                seeds=len(members),
                finished=len(results),
                failed=sum(job.failure is not None for job in members),
                accuracy=statistics.fmean(accuracies) if accuracies else None,
                spread=statistics.stdev(accuracies) if len(accuracies) > 1 else None,
                relative_time=seconds / reference if seconds and reference else None,
                sparsity=results[0]["sparsity"] if results else None,
                now=_now(members),
            )
        )
    return rows


def _now(members: Sequence[Job]) -> str:
    """How far the runs that are going on have come."""
    parts = []
    for job in members:
        if (job.directory / "running.json").exists():
            parts.append(f"epoch {_epochs(job)}/{job.config.epochs}")
    return ", ".join(parts)


def _epochs(job: Job) -> int:
    try:
        records: list[dict[str, Any]] = read_records(RunDirectory(job.directory).records)
    except (OSError, ValueError):  # not begun, or being written
        return 0
    return sum(record["kind"] == "epoch" for record in records)
