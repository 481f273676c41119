"""One run from its config to its result, in a directory of its own."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import joblib
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision

from sparsesam.lab import models
from sparsesam.lab.data import FolderSplits, Splits, download_bar, load
from sparsesam.lab.experiment import checkpoint
from sparsesam.lab.experiment.batches import Share, make_batches
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.errors import CheckpointError, DivergedError, Interrupted
from sparsesam.lab.experiment.interrupt import StopOnSignal
from sparsesam.lab.experiment.mask_record import forget_masks_from, is_cheap, write_masks
from sparsesam.lab.experiment.observers import Observer, Silent
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.experiment.records import read_records
from sparsesam.lab.experiment.run_directory import RunDirectory
from sparsesam.lab.experiment.seeds import Purpose, derive, seed_global
from sparsesam.lab.experiment.training import Sums, Training

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

#: Steps that warm times leave out.
WARM_UP = 5


@dataclass(frozen=True)
class Result:
    """What a finished run came to. Accuracies are shares of the test images; times are of training steps only.

    ``seconds_per_mask`` leaves the first mask out where there are more. The warm times, of runs with ``record_times``,
    are medians over the steps after the first few, without the masks they make.
    """

    test_accuracy: float
    best_test_accuracy: float
    test_loss: float
    train_loss: float
    train_accuracy: float
    epochs: float
    steps: int
    seconds: float
    seconds_per_epoch: float
    seconds_per_step: float
    seconds_per_mask: float | None
    warm_seconds_per_step: float | None
    warm_seconds_per_epoch: float | None
    images_per_second: float
    sparsity: float | None
    parameters: int


def run(config: TrainConfig, place: RunEnvironment, observer: Observer | None = None) -> Result:
    """Train as ``config`` says; with ``place.resume``, from where the run in its directory had come to.

    Raises `Interrupted` after a signal, `DivergedError` for a loss that is not finite, and `CheckpointError`: each
    leaves the last good checkpoint in place.
    """
    fabric = make_fabric(config, place)
    directory = RunDirectory(place.directory(config))
    main = fabric.global_rank == 0
    with directory.locked() if main else nullcontext(), torch.random.fork_rng(), _threads(place.threads):
        if main:
            directory.begin(config, resume=place.resume)
        splits = _load(config, place, shown=main and not isinstance(observer, Silent))
        fabric.launch()
        training = _training(config, splits, fabric, place)
        if place.resume:
            _restore(training, directory, fabric)
        return _train(config, place, training, directory, (observer if main else None) or Silent())


def make_fabric(config: TrainConfig, place: RunEnvironment) -> Fabric:
    options: dict[str, Any] = {
        "accelerator": place.accelerator,
        "devices": place.devices,
        "num_nodes": place.num_nodes,
    }
    try:
        fabric = Fabric(**options)
    except Exception as error:  # Lightning has many kinds for what this machine does not have
        told = ", ".join(f"{name} {value}" for name, value in options.items())
        raise ValueError(f"{told} cannot be had here: {error}") from error
    if config.precision == "fp32":
        return fabric
    device = fabric.device.type
    kind = "bf16-mixed" if config.precision == "bf16" else "16-mixed"
    return Fabric(**options, plugins=MixedPrecision(kind, device))  # type: ignore[arg-type]


def _load(config: TrainConfig, place: RunEnvironment, *, shown: bool) -> Splits | FolderSplits:
    with download_bar() if shown and sys.stdout.isatty() else nullcontext() as progress:
        return load(config.dataset, place.data_dir, place.download, progress)


def _training(config: TrainConfig, splits: Splits | FolderSplits, fabric: Fabric, place: RunEnvironment) -> Training:
    share = Share(fabric.global_rank, fabric.world_size)
    if share.world > 1 and config.ascent != "explicit" and not config.is_plain:
        raise ValueError(f"ascent must be explicit on several devices, got {config.ascent}; train on one")
    batches = make_batches(config, splits, share, fabric.device, _workers(place))
    seed_global(derive(config.seed, Purpose.WEIGHTS), fabric.device)
    model = models.build(config.model, splits.num_classes, splits.in_channels, splits.image_size)
    return Training(config, model, batches, fabric, record_times=place.record_times)


def _workers(place: RunEnvironment) -> int:
    return min(4, joblib.cpu_count()) if place.workers is None else place.workers


def _restore(training: Training, directory: RunDirectory, fabric: Fabric) -> None:
    """Go back to the last checkpoint; without one, to the beginning."""
    is_begun = directory.last.exists()
    if is_begun:
        content = checkpoint.load(directory.last, fabric.device)
        try:
            training.load_state_dict(content["training"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{directory.last} does not fit its run: {error}") from error
    if fabric.global_rank == 0:
        directory.forget_records_after(training.steps_taken if is_begun else -1)
        forget_masks_from(directory.masks, training.steps_taken)


def _train(
    config: TrainConfig, place: RunEnvironment, training: Training, directory: RunDirectory, observer: Observer
) -> Result:
    main = training.fabric.global_rank == 0
    origin = provenance()
    if main:
        kind = "resume" if training.steps_taken else "run"
        settings = {"config": asdict(config), "hash": config.content_hash, "provenance": origin}
        directory.append({"kind": kind, "step": training.steps_taken, **settings})
    observer.begin(config, training, str(directory.path))

    saved, made = training.steps_taken, 0
    records_masks = main and _records_masks(config, place, training)

    def on_step() -> None:
        nonlocal saved, made
        observer.step(training)
        # Before the checkpoint: a resumed run drops the masks that come after it, and makes them again.
        if records_masks and len(training.mask_seconds) > made:
            write_masks(directory.masks, training.steps_taken - 1, training.masks)
            made = len(training.mask_seconds)
        due = place.checkpoint_steps is not None and training.steps_taken - saved >= place.checkpoint_steps
        if main and due and training.looked:
            _save(training, config, directory)
            saved = training.steps_taken

    with StopOnSignal() as stop, _board(place, directory, training, main) as board:
        try:
            while not training.finished:
                if not training.advance(stop, on_step):
                    _save_if(main, training, config, directory)
                    raise Interrupted(
                        f"stopped after {training.steps_taken} steps, all saved; "
                        f"go on with: {place.resume_command(directory.path)}"
                    )
                _complete_epoch(config, place, training, directory, observer, board)
        except DivergedError as error:
            kept = f"the last good state is in {directory.last}" if directory.last.exists() else "no epoch was complete"
            raise DivergedError(f"{error}; {kept}") from None
        finally:
            observer.end()
    result = _result(training, read_records(directory.records)) if main else None
    result = training.fabric.broadcast(result)
    assert result is not None
    if main:
        directory.append({"kind": "result", "step": training.steps_taken, **asdict(result)})
        directory.finish(
            {"result": asdict(result), "config": asdict(config), "hash": config.content_hash, "provenance": origin}
        )
    return result


def _complete_epoch(
    config: TrainConfig,
    place: RunEnvironment,
    training: Training,
    directory: RunDirectory,
    observer: Observer,
    board: SummaryWriter | None,
) -> None:
    """Test, record and save; the last checkpoint comes last, so that a run killed in between does this epoch again."""
    test_loss, test_accuracy = training.test()
    sums, training.sums = training.sums, Sums()
    record: dict[str, Any] = {
        "kind": "epoch",
        "epoch": training.position.epoch + (training.position.step > 0),
        "step": training.steps_taken,
        "train_loss": sums.loss / sums.images,
        "train_accuracy": sums.correct / sums.images,
        "test_loss": test_loss,
        "test_accuracy": test_accuracy,
        "lr": training.optimizer.param_groups[0]["lr"],
        "rho": training.rho,
        "sparsity": training.sparsity,
        "seconds": sums.seconds,
        "masks": len(sums.mask_seconds),
        "mask_seconds": sum(sums.mask_seconds),
        "images_per_second": sums.images / sums.seconds,
        "skipped_ascents": getattr(training.optimizer, "skipped_ascents", 0),
    }
    if place.record_times:
        record["step_seconds"] = sums.step_seconds
        record["seconds_of_masks"] = sums.mask_seconds
    is_best = training.best is None or test_accuracy > training.best["test_accuracy"]
    if is_best:
        training.best = {"test_accuracy": test_accuracy, "epoch": record["epoch"]}
    if training.fabric.global_rank != 0:
        return
    if is_best:
        tested = training.module if training.ema is None else training.ema.module
        content: dict[str, Any] = {"config": asdict(config), "model": tested.state_dict(), **(training.best or {})}
        checkpoint.save(directory.best, content)
    directory.append(record)
    _save(training, config, directory)
    if board is not None:
        for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "lr", "rho", "sparsity"):
            if record[name] is not None:
                board.add_scalar(name.replace("_", "/", 1), record[name], record["epoch"])
    observer.epoch(record)


def _records_masks(config: TrainConfig, place: RunEnvironment, training: Training) -> bool:
    if place.record_masks is not None:
        return place.record_masks
    return is_cheap(config, sum(p.numel() for p in training.module.parameters()), training.batches.steps)


def _save(training: Training, config: TrainConfig, directory: RunDirectory) -> None:
    checkpoint.save(directory.last, {"config": asdict(config), "training": training.state_dict()})


def _save_if(main: bool, training: Training, config: TrainConfig, directory: RunDirectory) -> None:
    if main:
        _save(training, config, directory)


def _result(training: Training, records: list[dict[str, Any]]) -> Result:
    epochs = [record for record in records if record["kind"] == "epoch"]
    last, seconds = epochs[-1], [record["seconds"] for record in epochs]
    count, warm = training.steps_taken, _warm_seconds(epochs)
    assert training.best is not None
    return Result(
        test_accuracy=last["test_accuracy"],
        best_test_accuracy=training.best["test_accuracy"],
        test_loss=last["test_loss"],
        train_loss=last["train_loss"],
        train_accuracy=last["train_accuracy"],
        epochs=count / training.batches.steps,
        steps=count,
        seconds=sum(seconds),
        seconds_per_epoch=statistics.median(seconds),
        seconds_per_step=sum(seconds) / count,
        seconds_per_mask=_seconds_per_mask(epochs),
        warm_seconds_per_step=warm,
        warm_seconds_per_epoch=None if warm is None else warm * training.batches.steps,
        images_per_second=statistics.median(record["images_per_second"] for record in epochs),
        sparsity=training.sparsity,
        parameters=sum(parameter.numel() for parameter in training.module.parameters()),
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


@contextmanager
def _board(
    place: RunEnvironment, directory: RunDirectory, training: Training, main: bool
) -> Iterator[SummaryWriter | None]:
    if not (place.tensorboard and main):
        yield None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("curves need TensorBoard: pip install tensorboard, or pass --tensorboard false") from error
    with SummaryWriter(str(directory.path / "tensorboard"), purge_step=training.position.epoch + 1) as board:
        yield board


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
