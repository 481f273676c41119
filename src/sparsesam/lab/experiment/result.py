"""The result of a finished run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, Literal

from sparsesam.lab.experiment.training import Training

#: Steps that warm times leave out.
WARM_UP = 5


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
    seconds_per_epoch: float
    seconds_per_step: float
    seconds_per_mask: float | None
    warm_seconds_per_step: float | None
    warm_seconds_per_epoch: float | None
    images_per_second: float
    sparsity: float | None
    parameters: int


def run_result(training: Training, records: list[dict[str, Any]]) -> RunResult:
    """From the records of all epochs, and the state at the end."""
    epochs = [record for record in records if record["kind"] == "epoch"]
    last, seconds = epochs[-1], [record["seconds"] for record in epochs]
    steps, warm = training.steps_taken, _warm_seconds(epochs)
    best = training.best
    assert best is not None
    return RunResult(
        test_accuracy=last["test_accuracy"],
        best_test_accuracy=best["test_accuracy"],
        best_chosen_on="test" if best["val_accuracy"] is None else "val",
        best_epoch=best["epoch"],
        val_accuracy=last["val_accuracy"],
        test_loss=last["test_loss"],
        train_loss=last["train_loss"],
        train_accuracy=last["train_accuracy"],
        epochs=steps / training.batches.steps,
        steps=steps,
        forward_backwards=training.forward_backwards,
        forward_backwards_per_step=training.forward_backwards / steps,
        seconds=sum(seconds),
        seconds_per_epoch=statistics.median(seconds),
        seconds_per_step=sum(seconds) / steps,
        seconds_per_mask=_seconds_per_mask(epochs),
        warm_seconds_per_step=warm,
        warm_seconds_per_epoch=None if warm is None else warm * training.batches.steps,
        images_per_second=statistics.median(record["images_per_second"] for record in epochs),
        sparsity=training.sparsity,
        parameters=training.num_parameters,
    )


def _seconds_per_mask(epochs: list[dict[str, Any]]) -> float | None:
    """The median; the first mask of a run is slower, and counts only where there is no other."""
    recorded = [seconds for record in epochs for seconds in record.get("seconds_of_masks", [])]
    per_mask = recorded or [record["mask_seconds"] / record["masks"] for record in epochs if record["masks"]]
    return statistics.median(per_mask[1:] or per_mask) if per_mask else None


def _warm_seconds(epochs: list[dict[str, Any]]) -> float | None:
    """The median over the recorded steps but the first few: caches, allocators and autotuners warm up in those."""
    steps = [seconds for record in epochs for seconds in record.get("step_seconds", [])]
    return statistics.median(steps[WARM_UP:] or steps) if steps else None
