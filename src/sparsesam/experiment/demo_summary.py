"""From the demo's runs to the numbers of its table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparsesam.experiment.demo import DemoResult


@dataclass(frozen=True)
class DemoRow:
    """One optimizer over all seeds. ``spread`` is the sample standard deviation, None for a single seed."""

    optimizer: str
    accuracy: float
    spread: float | None
    relative_time: float
    sparsity: float | None


def summarize(results: Sequence[DemoResult], reference: str = "SGD") -> list[DemoRow]:
    """A row per optimizer, in the order they first appear.

    The relative time is that of all epochs and seeds together, mask updates included, over the reference's.
    """
    names = list(dict.fromkeys(result.optimizer for result in results))
    if reference not in names:
        raise ValueError(f"reference must be one of the optimizers run ({', '.join(names)}), got {reference!r}")
    reference_time = _time(results, reference)
    rows = []
    for name in names:
        accuracies = [result.test_accuracy for result in results if result.optimizer == name]
        rows.append(
            DemoRow(
                optimizer=name,
                accuracy=statistics.fmean(accuracies),
                spread=statistics.stdev(accuracies) if len(accuracies) > 1 else None,
                relative_time=_time(results, name) / reference_time,
                sparsity=next(result.sparsity for result in results if result.optimizer == name),
            )
        )
    return rows


def _time(results: Iterable[DemoResult], name: str) -> float:
    return sum(sum(result.seconds) for result in results if result.optimizer == name)
