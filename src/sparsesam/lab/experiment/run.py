"""One run in its own directory, from config to result."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import joblib
import torch

from sparsesam.lab import models
from sparsesam.lab.data import FolderSplits, Splits
from sparsesam.lab.display import plural
from sparsesam.lab.experiment import checkpoint
from sparsesam.lab.experiment.batches import Batches, load_splits
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.errors import CheckpointError, DivergedError, Interrupted, LostRankError, RunError
from sparsesam.lab.experiment.observers import Curves, RunObserver
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.experiment.result import EpochRecord, RunResult, best_of, complete_epoch, read_epochs, run_result
from sparsesam.lab.experiment.run_directory import RunDirectory, all_settings, append_records
from sparsesam.lab.experiment.seeds import Purpose, derive, seed_global
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
) -> RunResult:
    """Train with ``config``; with ``environment.resume``, from the last checkpoint in the run's directory.

    Everything is checked and built before anything is written: an invalid config leaves no directory behind.
    ``stop`` is called after every step; if it returns True the run stops, as on a signal, with `Interrupted`. Also
    raises `DivergedError` if the loss is not finite, and `CheckpointError`. All of them keep the last good checkpoint.
    """
    fabric = make_fabric(config, environment)
    directory = RunDirectory(environment.directory(config))
    main = fabric.global_rank == 0
    observers = [observer] if main and observer is not None else []
    if main and environment.logger != "none":
        observers.append(Curves(environment.logger, environment.name))
    with (
        torch.random.fork_rng(),
        torch_threads(environment.threads),
        _float32_products(config),
        ExitStack() as stack,
    ):
        if main:
            directory.check(config, resume=environment.resume)
        splits = load_splits(config, environment, progress=main and not environment.quiet and sys.stdout.isatty())
        fabric.launch()
        stack.enter_context(lost_ranks_are_named(fabric, resume_command(directory.path)))
        training = make_training(config, splits, fabric, environment)
        with directory.locked() if main else nullcontext():
            if environment.resume:  # first, so that an unreadable checkpoint leaves the run unchanged
                _restore(training, directory)
            recorder = RunRecorder(training, directory, environment) if main else None
            try:
                with lost_ranks_are_named(fabric, resume_command(directory.path)):
                    _train(training, directory, environment, [recorder, *observers] if recorder else [], stop)
                    result = fabric.broadcast(run_result(training, recorder.epochs) if recorder else None)
                assert result is not None
                if recorder:
                    recorder.finish(result)
                return result
            except Exception as error:
                if main and not isinstance(error, Interrupted | CheckpointError | LostRankError):
                    directory.write_failure(error)
                raise


@contextmanager
def lost_ranks_are_named(fabric: Fabric, command: str) -> Iterator[None]:
    """Replace the error of a broken connection by one line that names the ranks whose processes have ended."""
    if fabric.world_size == 1:
        yield
        return
    ranks: list[Any] = [None] * fabric.world_size
    try:
        torch.distributed.all_gather_object(ranks, (socket.gethostname(), os.getpid()))
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise LostRankError(f"a rank ended before training began ({reason}); continue with: {command}") from error
    try:
        yield
    except RunError:
        raise
    except RuntimeError as error:
        here = [(rank, pid) for rank, (host, pid) in enumerate(ranks) if host == socket.gethostname()]
        deadline = time.monotonic() + 2.0  # a connection ends before its process
        while not (lost := [(rank, pid) for rank, pid in here if not _is_alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not lost:
            raise
        if fabric.global_rank != next(rank for rank, pid in here if (rank, pid) not in lost):
            raise SystemExit(1) from error  # another rank says it
        names = " and ".join(f"rank {rank} (process {pid})" for rank, pid in lost)
        raise LostRankError(f"{names} ended, killed or by an error of its own; continue with: {command}") from error


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return not Path("/proc/self").exists()  # unknown without /proc


def make_fabric(config: TrainConfig, environment: RunEnvironment) -> Fabric:
    """Set up devices, processes and precision."""
    from lightning_fabric import Fabric  # takes seconds, which `--help` and a typo should not
    from lightning_fabric.plugins import MixedPrecision

    options: dict[str, Any] = {
        "accelerator": environment.accelerator,
        "devices": environment.devices,
        "num_nodes": environment.num_nodes,
    }
    try:
        fabric = Fabric(**options)
    except Exception as error:  # Lightning raises many types of errors for unavailable hardware
        asked = ", ".join(f"{name} {value}" for name, value in options.items())
        raise ValueError(f"{asked} is not available on this machine: {error}") from error
    if config.precision in ("fp32", "tf32"):
        return fabric
    device = fabric.device.type
    kind = "bf16-mixed" if config.precision == "bf16" else "16-mixed"
    return Fabric(**options, plugins=MixedPrecision(kind, device))  # type: ignore[arg-type]


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


def _restore(training: Training, directory: RunDirectory) -> None:
    """Load the last checkpoint; without one, start from the beginning."""
    main = training.fabric.global_rank == 0
    if not directory.last.exists():
        if main:
            directory.check_begun()
        return
    content = directory.load(directory.last, training.fabric.device)
    try:
        training.load_state_dict(content["training"])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory.last} does not fit its run: {error}") from error
    if main:
        directory.rewind(training.steps_taken, content["records"])
        _check_best(directory)


def _check_best(directory: RunDirectory) -> None:
    """Complete the replacement of ``best.pt``, and check that it is of the best epoch of the records."""
    epochs = read_epochs(directory.records)
    for file in (directory.next_best, directory.best):
        if epochs and file.exists():
            best, content = best_of(epochs), directory.load(file)
            if (content["epoch"], content["test_accuracy"]) == (best.epoch, best.test_accuracy):
                file.replace(directory.best)
                break
    else:
        if epochs:
            raise CheckpointError(
                f"{directory.best} is missing or not of the best epoch, {best_of(epochs).epoch}; restore it, or delete "
                "all files of the run to train from the beginning"
            )
    directory.next_best.unlink(missing_ok=True)


def _train(
    training: Training,
    directory: RunDirectory,
    environment: RunEnvironment,
    observers: Sequence[RunObserver],
    stop: Callable[[], bool],
) -> None:
    def on_step() -> None:
        for observer in observers:
            observer.step(training)

    for observer in observers:
        observer.begin(training, directory.path)
    complete = False
    with stop_on_signal() as signalled:
        try:
            while not training.finished:
                if training.advance(lambda: signalled() or stop(), on_step):
                    record = complete_epoch(training)
                    for observer in observers:
                        observer.epoch(record)
                if training.stop_requested and not training.finished:
                    raise Interrupted(
                        f"stopped after {plural(training.steps_taken, 'step')} and saved; "
                        f"continue with: {resume_command(directory.path)}"
                    )
            complete = True
        except DivergedError as error:
            last = directory.last
            kept = f"the last good checkpoint is {last}" if last.exists() else "no epoch was completed"
            raise DivergedError(f"{error}; {kept}") from None
        finally:
            for observer in observers:
                observer.end(complete=complete)


class RunRecorder(RunObserver):
    """Writes the settings, records, masks, checkpoints and result of a run; used on rank 0 only."""

    def __init__(self, training: Training, directory: RunDirectory, environment: RunEnvironment) -> None:
        self.training, self.directory, config = training, directory, training.config
        self.settings = all_settings(config, environment)
        self.checkpoint_steps = environment.checkpoint_steps
        small = masks_are_small(config, training.num_parameters, training.batches.steps)
        self.records_masks = small if environment.record_masks is None else environment.record_masks
        self.saved_at, self.masks = training.steps_taken, training.cost.masks
        if not environment.resume or not directory.last.exists():
            directory.rewind(-1, "")
        extended = directory.begin(config, environment)
        self.epochs, self.records = read_epochs(directory.records), directory.records.read_text()
        self.header = {
            "config": asdict(config),
            "hash": config.content_hash,
            "name": environment.name,
            "provenance": provenance(),
        }
        kind = "extend" if extended is not None else "resume" if training.steps_taken else "run"
        before = {} if extended is None else {"epochs_before": extended}
        self._append({"kind": kind, "step": training.steps_taken, **before, **self.header})

    def _append(self, record: Mapping[str, Any]) -> None:
        self.records += append_records(self.directory.records, [record])

    def step(self, training: Training) -> None:
        # Before the checkpoint: a resumed run removes and recomputes the masks made after it.
        if self.records_masks and training.cost.masks > self.masks:
            masks: Any = training.optimizer
            self.directory.write_masks(training.steps_taken - 1, masks.masks, training.config.identity)
            self.masks = training.cost.masks
        every, taken = self.checkpoint_steps, training.steps_taken - self.saved_at
        is_due = every is not None and training.synced and taken >= every
        if not training.epoch_ended and (is_due or training.stop_requested):
            self._save()

    def epoch(self, record: EpochRecord) -> None:
        """``last.pt`` decides: a run killed before it is replaced repeats this epoch, one killed after does not."""
        self.epochs.append(record)
        is_best = best_of(self.epochs) is record
        if is_best:
            tested = self.training.module if self.training.ema is None else self.training.ema.module
            figures = {name: getattr(record, name) for name in ("epoch", "val_accuracy", "test_accuracy")}
            content = {"settings": self.settings, "model": tested.state_dict(), **figures}
            checkpoint.save(self.directory.next_best, content)
        self._append({"kind": "epoch", **asdict(record)})
        self._save()
        if is_best:
            self.directory.next_best.replace(self.directory.best)

    def _save(self) -> None:
        training = self.training.state_dict()
        checkpoint.save(self.directory.last, {"settings": self.settings, "records": self.records, "training": training})
        self.saved_at = self.training.steps_taken

    def finish(self, result: RunResult) -> None:
        self._append({"kind": "result", "step": result.steps, **asdict(result)})
        self.directory.finish({"result": asdict(result), **self.header})


def resume_command(path: Path) -> str:
    return shlex.join(["sparsesam", "train", "--resume", "--out", str(path)])


def masks_are_small(config: TrainConfig, weights: int, steps_per_epoch: int) -> bool:
    """Whether all masks of a run with ``weights`` weights are small enough to be recorded by default."""
    masks = config.total_steps(steps_per_epoch) // config.steps_between_masks(steps_per_epoch) + 1
    return masks * weights / 8 <= SMALL_BYTES


@contextmanager
def _float32_products(config: TrainConfig) -> Iterator[None]:
    """With precision tf32, lets products of float32 matrices use TF32; otherwise the caller's choice stays."""
    before = torch.get_float32_matmul_precision()
    if config.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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
    """Yield a function that returns whether Ctrl-C or a scheduler's SIGTERM was received, to stop after the step.

    A second signal raises KeyboardInterrupt.
    """
    numbers: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if numbers:
            raise KeyboardInterrupt
        numbers.append(number)

    is_main = threading.current_thread() is threading.main_thread()  # only the main thread may set signal handlers
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
    try:
        yield lambda: bool(numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
