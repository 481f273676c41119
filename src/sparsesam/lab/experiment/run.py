"""One run in its own directory, from config to result: its training, what it writes, and how it is resumed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import joblib

from sparsesam.lab import models
from sparsesam.lab.data import FolderSplits, Splits
from sparsesam.lab.display import plural
from sparsesam.lab.experiment import checkpoint
from sparsesam.lab.experiment.batches import Batches, load_splits
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.errors import CheckpointError, DivergedError, Interrupted, LostRankError
from sparsesam.lab.experiment.observers import Curves, RunObserver
from sparsesam.lab.experiment.process import name_lost_ranks, stop_on_signal, torch_settings
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.experiment.result import EpochRecord, RunResult, best_of, complete_epoch, read_epochs, run_result
from sparsesam.lab.experiment.run_directory import RunDirectory, append_records
from sparsesam.lab.experiment.seeds import Purpose, derive_seed, seed_global
from sparsesam.lab.experiment.training import Training

if TYPE_CHECKING:
    from lightning_fabric import Fabric

#: By default masks are recorded if all masks of the run take at most this many bytes.
SMALL_BYTES = 16 * 2**20


def run_training(
    config: TrainConfig,
    environment: RunEnvironment,
    observer: RunObserver | None = None,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> RunResult | None:
    """Train with ``config``; with ``environment.resume``, from the last checkpoint in the run's directory. Returns the
    result on rank 0, None on others.

    Everything is checked and built before anything is written: an invalid config leaves no directory behind.
    ``stop`` is called after every step; if it returns True the run stops, as on a signal, with `Interrupted`. Also
    raises `DivergedError` if the loss is not finite, and `CheckpointError`. All of them keep the last good checkpoint.
    """
    fabric = make_fabric(config, environment)
    directory = RunDirectory(environment.directory(config))
    command = shlex.join(["sparsesam", "train", "--resume", "--out", str(directory.path)])
    main = fabric.global_rank == 0
    observers = [observer] if main and observer is not None else []
    if main and environment.logger != "none":
        observers.append(Curves(environment.logger, environment.name))
    recorder = None
    with torch_settings(environment.threads, tf32=config.precision == "tf32"):
        if main:
            directory.check(config, resume=environment.resume)
        splits = load_splits(config, environment, progress=main and not environment.quiet and sys.stdout.isatty())
        fabric.launch()
        try:
            with name_lost_ranks(fabric, command):
                training = make_training(config, splits, fabric, environment)
                with directory.locked() if main else nullcontext():
                    # First, so that an unreadable checkpoint leaves the run unchanged.
                    records = restore(training, directory) if environment.resume else ""
                    recorder = RunRecorder(training, directory, environment, records) if main else None
                    if not _train(training, directory.path, [recorder, *observers] if recorder else [], stop):
                        steps = plural(training.steps_taken, "step")
                        raise Interrupted(f"stopped after {steps} and saved; continue with: {command}")
                    if recorder is None:
                        return None
                    result = run_result(training, recorder.epochs)
                    recorder.finish(result)
                    return result
        except Exception as error:
            if recorder and not isinstance(error, Interrupted | CheckpointError | LostRankError):
                directory.write_failure(error)
            if isinstance(error, DivergedError) and directory.last.exists():
                raise DivergedError(f"{error}; the last good checkpoint is {directory.last}") from None
            raise


def make_fabric(config: TrainConfig, environment: RunEnvironment) -> Fabric:
    """Set up devices, processes and precision."""
    from lightning_fabric import Fabric  # takes seconds, which `--help` and a typo should not
    from lightning_fabric.plugins import MixedPrecision

    options: dict[str, Any] = {name: getattr(environment, name) for name in ("accelerator", "devices", "num_nodes")}
    try:
        fabric = Fabric(**options)
    except Exception as error:  # Lightning raises many types of errors for unavailable hardware
        hardware = ", ".join(f"{name} {value}" for name, value in options.items())
        raise ValueError(f"{hardware} is not available on this machine: {error}") from error
    if config.precision in ("fp32", "tf32"):
        return fabric
    kind = "bf16-mixed" if config.precision == "bf16" else "16-mixed"
    return Fabric(**options, plugins=MixedPrecision(kind, fabric.device.type))  # type: ignore[arg-type]


def make_training(
    config: TrainConfig, splits: Splits | FolderSplits, fabric: Fabric, environment: RunEnvironment
) -> Training:
    """Build batches, model and optimizer of a run at its first step."""
    if fabric.world_size > 1 and config.ascent != "explicit" and not config.is_plain:
        raise ValueError(f"ascent must be explicit on several devices, got {config.ascent}; use one device")
    workers = min(4, joblib.cpu_count()) if environment.workers is None else environment.workers
    batches = Batches(config, splits, fabric.device, rank=fabric.global_rank, world=fabric.world_size, workers=workers)
    seed_global(derive_seed(config.seed, Purpose.WEIGHTS), fabric.device)
    model = models.build_model(config.model, splits.num_classes, splits.in_channels, splits.image_size)
    if config.init_from is not None:
        try:
            checkpoint.initialize(model, Path(config.init_from))
        except CheckpointError as error:
            raise ValueError(f"init_from: {error}") from error
    return Training(config, model, batches, fabric, record_times=environment.record_times)


def _train(training: Training, place: Path, observers: Sequence[RunObserver], stop: Callable[[], bool]) -> bool:
    """Train to the end, or until a signal or ``stop``; returns whether the run is complete."""

    def on_step() -> None:
        for observer in observers:
            observer.step(training)

    for observer in observers:
        observer.begin(training, place)
    complete = False
    with stop_on_signal() as signalled:
        try:
            while not (training.finished or training.stop_requested):
                training.advance(lambda: signalled() or stop(), on_step)
                if training.epoch_ended:
                    record = complete_epoch(training)
                    for observer in observers:
                        observer.epoch(record)
            complete = training.finished
            return complete
        finally:
            for observer in observers:
                observer.end(complete=complete)


# ---- what a run writes -----------------------------------------------------------------------------------------------


def restore(training: Training, directory: RunDirectory) -> str:
    """Load the last checkpoint and return the records in it; without one, start from the beginning."""
    if not directory.last.exists():
        return ""
    content = directory.load(directory.last, training.fabric.device)
    try:
        training.load_state_dict(content["training"])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory.last} does not fit its run: {error}") from error
    return str(content["records"])


def masks_are_small(config: TrainConfig, weights: int, steps_per_epoch: int) -> bool:
    """Whether all masks of a run with ``weights`` weights are small enough to be recorded by default."""
    masks = config.total_steps(steps_per_epoch) // config.steps_between_masks(steps_per_epoch) + 1
    return masks * weights / 8 <= SMALL_BYTES


class RunRecorder(RunObserver):
    """Writes settings, records, masks, checkpoints and result, on rank 0 only.

    ``records`` are those in the checkpoint that the run continues: what was written after it is removed.
    """

    def __init__(self, training: Training, directory: RunDirectory, environment: RunEnvironment, records: str) -> None:
        self.training, self.directory, self.records, config = training, directory, records, training.config
        self.checkpoint_steps = environment.checkpoint_steps
        small = masks_are_small(config, training.num_parameters, training.batches.steps)
        self.records_masks = small if environment.record_masks is None else environment.record_masks
        self.saved_at, self.masks = training.steps_taken, training.cost.masks
        directory.check(config, resume=environment.resume)  # again: now no other process can change it
        directory.rewind(training.steps_taken, records)
        self.epochs = read_epochs(directory.records)
        if self.epochs:
            self._check_best(best_of(self.epochs))
        directory.begin(config, environment)
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
            self._save_best(record)

    def finish(self, result: RunResult) -> None:
        self._append({"kind": "result", "step": result.steps, **asdict(result)})
        self.directory.finish({"result": asdict(result), **self.header})

    def _save(self) -> None:
        content = {"records": self.records, "training": self.training.state_dict()}
        checkpoint.save(self.directory.last, self.training.config.identity, content)
        self.saved_at = self.training.steps_taken

    def _save_best(self, record: EpochRecord) -> None:
        tested = self.training.module if self.training.ema is None else self.training.ema.module
        figures = {"epoch": record.epoch, "test_accuracy": record.test_accuracy}
        content = {"model": tested.state_dict(), **figures}
        checkpoint.save(self.directory.best, self.training.config.identity, content)

    def _check_best(self, best: EpochRecord) -> None:
        """Raise CheckpointError if a resumed run's ``best.pt`` is not of its best epoch."""
        file = self.directory.best
        if best.step == self.training.steps_taken:  # a kill may have left it unwritten
            self._save_best(best)
        elif not file.exists() or self.directory.load(file)["epoch"] != best.epoch:
            raise CheckpointError(
                f"{file} is missing or not of the best epoch, {best.epoch}; restore it, or delete all files of the run "
                "to train from the beginning"
            )
