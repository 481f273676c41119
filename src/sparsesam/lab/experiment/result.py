"""The outcome of a run: a record of each epoch, and the result of a finished run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from sparsesam.lab.experiment.errors import RunError
from sparsesam.lab.experiment.run_directory import read_json, read_records

if TYPE_CHECKING:
    from sparsesam.lab.experiment.training import Training

Made = TypeVar("Made", "EpochRecord", "RunResult")
#: Steps excluded from warm times, in which caches, allocators and autotuners warm up.
WARM_UP = 5


@dataclass
class Sums:
    """Sums over an epoch."""

    loss: float = 0.0
    correct: float = 0.0
    images: float = 0.0
    seconds: float = 0.0
    mask_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Metrics:
    """Fields shared by the record of an epoch and the result of a run. Accuracies are fractions.

    ``forward_backwards`` is the cost of the run so far in forward-backward passes over a batch
    (`sparsesam.lab.experiment.cost`).
    """

    train_loss: float
    train_accuracy: float
    val_accuracy: float | None
    test_loss: float
    test_accuracy: float
    test_top5_accuracy: float
    forward_backwards: float
    sparsity: float | None


@dataclass(frozen=True, kw_only=True)
class EpochRecord(_Metrics):
    """A line of ``records.jsonl``. ``step`` and ``forward_backwards`` cover the run so far, all else the epoch.

    ``mask_seconds`` has the time of each mask refresh, ``step_seconds`` that of each step (with ``record_times``).
    """

    epoch: int
    epochs: int
    step: int
    val_loss: float | None
    lr: float
    rho: float | None
    seconds: float
    images_per_second: float
    skipped_ascents: int
    mask_seconds: list[float]
    step_seconds: list[float]


@dataclass(frozen=True, kw_only=True)
class RunResult(_Metrics):
    """Losses and accuracies are those of the last epoch; times are those of training steps, including mask refreshes.

    ``best_test_accuracy`` is the test accuracy of ``best.pt``, the epoch with the best accuracy on
    ``best_chosen_on``: the validation images, or the test images if the run has no validation images.
    ``budget`` is the requested price of a step, ``forward_backwards_per_step`` the counted price.
    ``seconds_per_mask`` excludes the first mask if there are more. The warm times (with ``record_times``) are medians
    over the steps after the first few, without mask refreshes.
    """

    best_test_accuracy: float
    best_chosen_on: Literal["val", "test"]
    best_epoch: int
    epochs: float
    steps: int
    forward_backwards_per_step: float
    budget: float | None
    seconds: float
    seconds_per_mask: float | None
    warm_seconds_per_step: float | None
    warm_seconds_per_epoch: float | None
    parameters: int


def complete_epoch(training: Training) -> EpochRecord:
    """Evaluate the epoch that has ended and reset the sums for the next."""
    sums, training.sums = training.sums, Sums()
    val_loss, val_accuracy, _ = training.evaluate("val") if training.config.val_size else (None, None, None)
    test_loss, test_accuracy, test_top5_accuracy = training.evaluate("test")
    return EpochRecord(
        epoch=math.ceil(training.steps_taken / training.batches.steps),
        epochs=training.config.epochs,
        step=training.steps_taken,
        train_loss=sums.loss / sums.images,
        train_accuracy=sums.correct / sums.images,
        val_loss=val_loss,
        val_accuracy=val_accuracy,
        test_loss=test_loss,
        test_accuracy=test_accuracy,
        test_top5_accuracy=test_top5_accuracy,
        lr=training.optimizer.param_groups[0]["lr"],
        rho=training.rho,
        sparsity=getattr(training.optimizer, "sparsity", None),
        forward_backwards=training.cost.forward_backwards,
        seconds=sums.seconds,
        images_per_second=sums.images / sums.seconds,
        skipped_ascents=getattr(training.optimizer, "skipped_ascents", 0),
        mask_seconds=sums.mask_seconds,
        step_seconds=sums.step_seconds,
    )


def best_of(epochs: Sequence[EpochRecord]) -> EpochRecord:
    """Returns the first epoch with the highest validation accuracy, or test accuracy without validation images."""
    return max(epochs, key=lambda epoch: epoch.test_accuracy if epoch.val_accuracy is None else epoch.val_accuracy)


def run_result(training: Training, epochs: Sequence[EpochRecord]) -> RunResult:
    last, best, steps_per_epoch = epochs[-1], best_of(epochs), training.batches.steps
    warm = _warm_median([seconds for record in epochs for seconds in record.step_seconds], WARM_UP)
    return RunResult(
        **{metric.name: getattr(last, metric.name) for metric in fields(_Metrics)},
        best_test_accuracy=best.test_accuracy,
        best_chosen_on="test" if best.val_accuracy is None else "val",
        best_epoch=best.epoch,
        epochs=last.step / steps_per_epoch,
        steps=last.step,
        forward_backwards_per_step=last.forward_backwards / last.step,
        budget=training.config.budget if training.config.has_budget else None,
        seconds=sum(record.seconds for record in epochs),
        seconds_per_mask=_warm_median([seconds for record in epochs for seconds in record.mask_seconds], 1),
        warm_seconds_per_step=warm,
        warm_seconds_per_epoch=None if warm is None else warm * steps_per_epoch,
        parameters=training.num_parameters,
    )


def _warm_median(seconds: list[float], cold: int) -> float | None:
    """Returns the median without the first ``cold`` values, or of all if there are no more; None for no values."""
    return statistics.median(seconds[cold:] or seconds) if seconds else None


def read_epochs(path: Path) -> list[EpochRecord]:
    """Read the records of kind "epoch" in a run's ``records.jsonl``."""
    return [_build(EpochRecord, path, record) for record in read_records(path) if record.pop("kind", None) == "epoch"]


def read_result(path: Path, run: str | None = None) -> RunResult | None:
    """Read the ``result.json`` of the run with the hash ``run``; None if it does not exist."""
    content = read_json(path)
    if content is not None and run is not None and content.get("hash", run) != run:
        raise RunError(f"{path} is the result of another run; delete it and run the same command again")
    return None if content is None else _build(RunResult, path, content.get("result"))


def _build(kind: type[Made], path: Path, values: Any) -> Made:
    try:
        return kind(**values)
    except TypeError as error:
        raise RunError(f"{path} is not of this version of sparsesam ({error}); restore or delete it") from error
