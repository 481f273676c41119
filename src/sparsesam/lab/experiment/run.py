"""One run in its own directory, from config to result."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
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
from sparsesam.lab.experiment.process import lost_ranks_are_named, stop_on_signal, torch_settings
from sparsesam.lab.experiment.recorder import RunRecorder, restore
from sparsesam.lab.experiment.result import RunResult, complete_epoch, run_result
from sparsesam.lab.experiment.run_directory import RunDirectory
from sparsesam.lab.experiment.seeds import Purpose, derive, seed_global
from sparsesam.lab.experiment.training import Training

if TYPE_CHECKING:
    from lightning_fabric import Fabric


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
            with lost_ranks_are_named(fabric, command):
                training = make_training(config, splits, fabric, environment)
                with directory.locked() if main else nullcontext():
                    if environment.resume:  # first, so that an unreadable checkpoint leaves the run unchanged
                        restore(training, directory)
                    recorder = RunRecorder(training, directory, environment) if main else None
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
    seed_global(derive(config.seed, Purpose.WEIGHTS), fabric.device)
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
