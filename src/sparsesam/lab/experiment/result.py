"""What is known of a run: a record of each epoch, and the result when it is finished."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparsesam.lab.experiment.run_directory import read_records
from sparsesam.lab.experiment.training import Training

#: Steps that warm times leave out: caches, allocators and autotuners warm up in those.
WARM_UP = 5


@dataclass(frozen=True)
class EpochRecord:
    """A line of ``records.jsonl``. ``step`` and ``forward_backwards`` are of the run so far, all else of the epoch.

    ``mask_seconds`` has the time of each mask, ``step_seconds`` that of each step, of runs with ``record_times``.
    """

    epoch: int
    epochs: int
    step: int
    train_loss: float
    train_accuracy: float
    val_loss: float | None
    val_accuracy: float | None
    test_loss: float
    test_accuracy: float
    lr: float
    rho: float | None
    sparsity: float | None
    forward_backwards: float
    seconds: float
    images_per_second: float
    skipped_ascents: int
    mask_seconds: list[float]
    step_seconds: list[float]


def best_of(epochs: Sequence[EpochRecord]) -> EpochRecord:
    """The first with the highest accuracy on validation images, or on test images where the run has no others."""
    return max(epochs, key=lambda one: one.test_accuracy if one.val_accuracy is None else one.val_accuracy)


def read_epochs(path: Path) -> list[EpochRecord]:
    """The records of kind "epoch" in a run's ``records.jsonl``."""
    return [EpochRecord(**record) for record in read_records(path) if record.pop("kind") == "epoch"]


@dataclass(frozen=True)
class RunResult:
    """Accuracies are fractions; times are of training steps only, mask making included.

    ``test_accuracy`` is that of the last epoch, ``best_test_accuracy`` that of ``best.pt``, the epoch with the best
    accuracy on ``best_chosen_on``: the validation images, or the test images where the run has no validation images.
    ``forward_backwards`` is the cost of the run in forward and backward passes over a batch
    (`sparsesam.lab.experiment.cost`), ``forward_backwards_per_step`` that of a step.
    ``seconds_per_mask`` leaves the first mask out where there are more. The warm times, of runs with ``record_times``,
    are medians over the steps after the first few, without the masks they make.
    """

    test_accuracy: float
    best_test_accuracy: float
    best_chosen_on: Literal["val", "test"]
    best_epoch: int
    val_accuracy: float | None
    test_loss: float
    train_loss: float
    train_accuracy: float
    epochs: float
    steps: int
    forward_backwards: float
    forward_backwards_per_step: float
    seconds: float
    seconds_per_mask: float | None
    warm_seconds_per_step: float | None
    warm_seconds_per_epoch: float | None
    sparsity: float | None
    parameters: int


def run_result(training: Training, epochs: Sequence[EpochRecord]) -> RunResult:
    """From the records of all epochs, and the state at the end."""
    last, best, steps = epochs[-1], best_of(epochs), training.steps_taken
    warm = _warm_median([seconds for record in epochs for seconds in record.step_seconds], WARM_UP)
    return RunResult(
        test_accuracy=last.test_accuracy,
        best_test_accuracy=best.test_accuracy,
        best_chosen_on="test" if best.val_accuracy is None else "val",
        best_epoch=best.epoch,
        val_accuracy=last.val_accuracy,
        test_loss=last.test_loss,
        train_loss=last.train_loss,
        train_accuracy=last.train_accuracy,
        epochs=steps / training.batches.steps,
        steps=steps,
        forward_backwards=training.cost.forward_backwards,
        forward_backwards_per_step=training.cost.forward_backwards / steps,
        seconds=sum(record.seconds for record in epochs),
        seconds_per_mask=_warm_median([seconds for record in epochs for seconds in record.mask_seconds], 1),
        warm_seconds_per_step=warm,
        warm_seconds_per_epoch=None if warm is None else warm * training.batches.steps,
        sparsity=training.sparsity,
        parameters=training.num_parameters,
    )


def _warm_median(seconds: list[float], cold: int) -> float | None:
    """Without the first ``cold`` ones where there are more; None of none."""
    return statistics.median(seconds[cold:] or seconds) if seconds else None
