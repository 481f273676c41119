"""Writes the settings, records, masks, checkpoints and result of a run, and continues them when it is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sparsesam.lab.experiment import checkpoint
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.errors import CheckpointError
from sparsesam.lab.experiment.observers import RunObserver
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.experiment.result import EpochRecord, RunResult, best_of, read_epochs
from sparsesam.lab.experiment.run_directory import RunDirectory, append_records
from sparsesam.lab.experiment.training import Training

#: By default masks are recorded if all masks of the run take at most this many bytes.
SMALL_BYTES = 16 * 2**20


def masks_are_small(config: TrainConfig, weights: int, steps_per_epoch: int) -> bool:
    """Whether all masks of a run with ``weights`` weights are small enough to be recorded by default."""
    masks = config.total_steps(steps_per_epoch) // config.steps_between_masks(steps_per_epoch) + 1
    return masks * weights / 8 <= SMALL_BYTES


class RunRecorder(RunObserver):
    """Used on rank 0 only."""

    def __init__(self, training: Training, directory: RunDirectory, environment: RunEnvironment) -> None:
        self.training, self.directory, config = training, directory, training.config
        self.checkpoint_steps = environment.checkpoint_steps
        small = masks_are_small(config, training.num_parameters, training.batches.steps)
        self.records_masks = small if environment.record_masks is None else environment.record_masks
        self.saved_at, self.masks = training.steps_taken, training.cost.masks
        directory.begin(config, environment)
        if not (environment.resume and directory.last.exists()):
            directory.rewind(-1, "")
        self.epochs, self.records = read_epochs(directory.records), directory.records.read_text()
        about = {"config": asdict(config), "hash": config.content_hash, "name": environment.name}
        self.header = {**about, "provenance": provenance()}
        self._append({"kind": "resume" if training.steps_taken else "run", "step": training.steps_taken, **self.header})

    def _append(self, record: Mapping[str, Any]) -> None:
        self.records += append_records(self.directory.records, [record])

    def step(self, training: Training) -> None:
        # Before the checkpoint: a resumed run removes and recomputes the masks made after it.
        if self.records_masks and training.cost.masks > self.masks:
            optimizer: Any = training.optimizer
            self.directory.write_masks(training.steps_taken - 1, optimizer.masks, training.config.identity)
            self.masks = training.cost.masks
        every, taken = self.checkpoint_steps, training.steps_taken - self.saved_at
        is_due = every is not None and training.synced and taken >= every
        if not training.epoch_ended and (is_due or training.stop_requested):
            self._save()

    def epoch(self, record: EpochRecord) -> None:
        """``last.pt`` decides: a run killed before it is replaced repeats this epoch, one killed after does not."""
        self.epochs.append(record)
        self._append({"kind": "epoch", **asdict(record)})
        self._save()
        if best_of(self.epochs) is record:
            _save_best(self.training, self.directory, record)

    def _save(self) -> None:
        content = {"records": self.records, "training": self.training.state_dict()}
        checkpoint.save(self.directory.last, self.training.config.identity, content)
        self.saved_at = self.training.steps_taken

    def finish(self, result: RunResult) -> None:
        self._append({"kind": "result", "step": result.steps, **asdict(result)})
        self.directory.finish({"result": asdict(result), **self.header})


def restore(training: Training, directory: RunDirectory) -> None:
    """Load the last checkpoint; without one, start from the beginning."""
    if not directory.last.exists():
        return
    content = directory.load(directory.last, training.fabric.device)
    try:
        training.load_state_dict(content["training"])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory.last} does not fit its run: {error}") from error
    if training.fabric.global_rank != 0:
        return
    directory.rewind(training.steps_taken, content["records"])
    if not (epochs := read_epochs(directory.records)):
        return
    best = best_of(epochs)
    if best.step == training.steps_taken:  # a kill may have left it unwritten
        _save_best(training, directory, best)
    elif not directory.best.exists() or directory.load(directory.best)["epoch"] != best.epoch:
        raise CheckpointError(
            f"{directory.best} is missing or not of the best epoch, {best.epoch}; restore it, or delete all files of "
            "the run to train from the beginning"
        )


def _save_best(training: Training, directory: RunDirectory, record: EpochRecord) -> None:
    tested = training.module if training.ema is None else training.ema.module
    figures = {"epoch": record.epoch, "test_accuracy": record.test_accuracy}
    checkpoint.save(directory.best, training.config.identity, {"model": tested.state_dict(), **figures})
