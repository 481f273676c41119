"""One run, from its config to its result, in a directory of its own."""

from __future__ import annotations

import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import joblib
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision

from sparsesam.lab import models
from sparsesam.lab.data import FolderSplits, Splits
from sparsesam.lab.display import plural
from sparsesam.lab.experiment import checkpoint
from sparsesam.lab.experiment.batches import Batches, load_splits
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.errors import CheckpointError, DivergedError, Interrupted
from sparsesam.lab.experiment.observers import Curves, RunObserver
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.experiment.result import EpochRecord, RunResult, best_of, read_epochs, run_result
from sparsesam.lab.experiment.run_directory import RunDirectory
from sparsesam.lab.experiment.seeds import Purpose, derive, seed_global
from sparsesam.lab.experiment.training import Sums, Training

#: By default masks are recorded if those of the whole run take no more than this.
SMALL_BYTES = 16 * 2**20


def run_training(
    config: TrainConfig,
    environment: RunEnvironment,
    observer: RunObserver | None = None,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> RunResult:
    """Train as ``config`` says; with ``environment.resume``, from the last checkpoint in the run's directory.

    Everything is checked and built before anything is written: a config that is refused leaves no directory.
    ``stop`` is asked after every step, like a signal, whether to stop there. Raises `Interrupted` then,
    `DivergedError` for a loss that is not finite, and `CheckpointError`: each leaves the last good checkpoint.
    """
    fabric = make_fabric(config, environment)
    directory = RunDirectory(environment.directory(config))
    main = fabric.global_rank == 0
    observers = [observer] if main and observer is not None else []
    if main and environment.logger != "none":
        observers.append(Curves(environment.logger, environment.name))
    with torch.random.fork_rng(), torch_threads(environment.threads):
        if main:
            directory.check(config, resume=environment.resume)
        shows_progress = main and type(observer) is not RunObserver and sys.stdout.isatty()
        splits = load_splits(config, environment, progress=shows_progress)
        fabric.launch()
        training = make_training(config, splits, fabric, environment)
        with directory.locked() if main else nullcontext():
            if environment.resume:  # a checkpoint that cannot be read leaves the run as it is
                _restore(training, directory)
            extended = directory.begin(config, resume=environment.resume) if main else None
            try:
                return _Run(environment, training, directory, observers).train(extended, stop)
            except Exception as error:
                if main and not isinstance(error, Interrupted | CheckpointError):
                    directory.write_failure(error)
                raise


def make_fabric(config: TrainConfig, environment: RunEnvironment) -> Fabric:
    """Devices, processes and precision."""
    options: dict[str, Any] = {
        "accelerator": environment.accelerator,
        "devices": environment.devices,
        "num_nodes": environment.num_nodes,
    }
    try:
        fabric = Fabric(**options)
    except Exception as error:  # Lightning raises many kinds for what this machine does not have
        asked = ", ".join(f"{name} {value}" for name, value in options.items())
        raise ValueError(f"{asked} is not available on this machine: {error}") from error
    if config.precision == "fp32":
        return fabric
    device = fabric.device.type
    kind = "bf16-mixed" if config.precision == "bf16" else "16-mixed"
    return Fabric(**options, plugins=MixedPrecision(kind, device))  # type: ignore[arg-type]


def make_training(
    config: TrainConfig, splits: Splits | FolderSplits, fabric: Fabric, environment: RunEnvironment
) -> Training:
    """The run at its first step: batches, model and optimizer."""
    if fabric.world_size > 1 and config.ascent != "explicit" and not config.is_plain:
        raise ValueError(f"ascent must be explicit on several devices, got {config.ascent}; train on one")
    workers = min(4, joblib.cpu_count()) if environment.workers is None else environment.workers
    batches = Batches(config, splits, fabric.device, rank=fabric.global_rank, world=fabric.world_size, workers=workers)
    seed_global(derive(config.seed, Purpose.WEIGHTS), fabric.device)
    model = models.build_model(config.model, splits.num_classes, splits.in_channels, splits.image_size)
    if config.init_from is not None:
        try:
            checkpoint.initialize(model, Path(config.init_from))
        except CheckpointError as error:
            raise ValueError(f"init_from: {error}") from error
    return Training(config, model, batches, fabric, record_times=environment.record_times)


def _restore(training: Training, directory: RunDirectory) -> None:
    """Load the last checkpoint; without one, the run starts from the beginning."""
    is_begun = directory.last.exists()
    if is_begun:
        content = checkpoint.load(directory.last, training.fabric.device)
        try:
            training.load_state_dict(content["training"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{directory.last} does not fit its run: {error}") from error
    if training.fabric.global_rank == 0:
        directory.rewind(training.steps_taken if is_begun else -1)


class _Run:
    """The training of one run, and what is recorded of it; only rank 0 writes."""

    def __init__(
        self, environment: RunEnvironment, training: Training, directory: RunDirectory, observers: list[RunObserver]
    ) -> None:
        self.environment, self.training, self.directory, self.observers = environment, training, directory, observers
        self.config, self.main = training.config, training.fabric.global_rank == 0
        small = masks_are_small(self.config, training.num_parameters, training.batches.steps)
        self.records_masks = self.main and (small if environment.record_masks is None else environment.record_masks)
        self.epochs = read_epochs(directory.records) if self.main else []
        self.saved_at, self.masks = training.steps_taken, training.cost.masks

    def train(self, extended: int | None, stop: Callable[[], bool]) -> RunResult:
        """``extended`` is the number of epochs that the run had before, if this extends it."""
        training, directory = self.training, self.directory
        origin = {
            "config": asdict(self.config),
            "hash": self.config.content_hash,
            "name": self.environment.name,
            "provenance": provenance(),
        }
        if self.main:
            kind = "extend" if extended is not None else "resume" if training.steps_taken else "run"
            before = {} if extended is None else {"epochs_before": extended}
            directory.append({"kind": kind, "step": training.steps_taken, **before, **origin})
        for observer in self.observers:
            observer.begin(training, directory.path)
        complete = False
        with stop_on_signal() as signalled:
            try:
                while not training.finished:
                    if training.advance(lambda: signalled() or stop(), self._on_step):
                        self._complete_epoch()
                    elif self.main:
                        self._save()
                    if training.stop_requested and not training.finished:
                        raise Interrupted(
                            f"stopped after {plural(training.steps_taken, 'step')} and saved; "
                            f"continue with: {self.environment.resume_command(directory.path)}"
                        )
                complete = True
            except DivergedError as error:
                last = directory.last
                kept = f"the last good state is in {last}" if last.exists() else "no epoch was complete"
                raise DivergedError(f"{error}; {kept}") from None
            finally:
                for observer in self.observers:
                    observer.end(complete=complete)
        result = training.fabric.broadcast(run_result(training, self.epochs) if self.main else None)
        assert result is not None
        if self.main:
            directory.append({"kind": "result", "step": training.steps_taken, **asdict(result)})
            directory.finish({"result": asdict(result), **origin})
        return result

    def _on_step(self) -> None:
        """Call the observers, write a new mask, save a checkpoint that is due."""
        training = self.training
        for observer in self.observers:
            observer.step(training)
        # Before the checkpoint: a resumed run removes the masks that come after it, and makes them again.
        if self.records_masks and training.cost.masks > self.masks:
            self.directory.write_masks(training.steps_taken - 1, training.optimizer.masks)  # type: ignore[attr-defined]
            self.masks = training.cost.masks
        every = self.environment.checkpoint_steps
        if self.main and every is not None and training.synced and training.steps_taken - self.saved_at >= every:
            self._save()
            self.saved_at = training.steps_taken

    def _complete_epoch(self) -> None:
        """Evaluate, record and save; the checkpoint comes last, so that a run killed before it repeats this epoch."""
        record = self._epoch_record()
        if not self.main:
            return
        training = self.training
        self.epochs.append(record)
        if best_of(self.epochs) is record:
            tested = training.module if training.ema is None else training.ema.module
            figures = {name: getattr(record, name) for name in ("epoch", "val_accuracy", "test_accuracy")}
            content = {"config": asdict(self.config), "model": tested.state_dict(), **figures}
            checkpoint.save(self.directory.best, content)
        self.directory.append({"kind": "epoch", **asdict(record)})
        self._save()
        for observer in self.observers:
            observer.epoch(record)

    def _epoch_record(self) -> EpochRecord:
        training = self.training
        sums, training.sums = training.sums, Sums()
        val_loss, val_accuracy = training.evaluate("val") if self.config.val_size else (None, None)
        test_loss, test_accuracy = training.evaluate("test")
        return EpochRecord(
            epoch=math.ceil(training.steps_taken / training.batches.steps),
            epochs=self.config.epochs,
            step=training.steps_taken,
            train_loss=sums.loss / sums.images,
            train_accuracy=sums.correct / sums.images,
            val_loss=val_loss,
            val_accuracy=val_accuracy,
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            lr=training.optimizer.param_groups[0]["lr"],
            rho=training.rho,
            sparsity=training.sparsity,
            forward_backwards=training.cost.forward_backwards,
            seconds=sums.seconds,
            images_per_second=sums.images / sums.seconds,
            skipped_ascents=getattr(training.optimizer, "skipped_ascents", 0),
            mask_seconds=sums.mask_seconds,
            step_seconds=sums.step_seconds,
        )

    def _save(self) -> None:
        content = {"config": asdict(self.config), "training": self.training.state_dict()}
        checkpoint.save(self.directory.last, content)


def masks_are_small(config: TrainConfig, weights: int, steps_per_epoch: int) -> bool:
    """Whether all masks of a run of ``weights`` weights are small enough to be written by default."""
    masks = config.total_steps(steps_per_epoch) // config.steps_between_masks(steps_per_epoch) + 1
    return masks * weights / 8 <= SMALL_BYTES


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """A function that says whether Ctrl-C or a scheduler's SIGTERM came within the block, to stop after that step.

    A second one raises KeyboardInterrupt.
    """
    numbers: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if numbers:
            raise KeyboardInterrupt
        numbers.append(number)

    is_main = threading.current_thread() is threading.main_thread()  # only there are signals received
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
    try:
        yield lambda: bool(numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
