"""A trained run to measure: its model, its loss over a fixed sample of its images, its masks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from sparsesam.analysis import Objective, check_state
from sparsesam.analysis.objective import Statistics
from sparsesam.lab import models
from sparsesam.lab.data import FolderSplits, Splits, load
from sparsesam.lab.experiment import checkpoint
from sparsesam.lab.experiment.batches import Batches, Share, Split, make_batches
from sparsesam.lab.experiment.errors import CheckpointError
from sparsesam.lab.experiment.initial_weights import weights_of
from sparsesam.lab.experiment.mask_record import mask_files, read_mask_file
from sparsesam.lab.experiment.run_directory import RunDirectory
from sparsesam.lab.inspection.options import option
from sparsesam.lab.inspection.store import Origin
from sparsesam.wrapper import split_own


@dataclass(frozen=True)
class MeasuredOn:
    """Which weights of a run are measured, and on which of its images."""

    checkpoint: Literal["last", "best"] = option("last", "the run's last weights, or those with the best test accuracy")
    split: Split = option("train", "the images to measure on, without augmentation")
    samples: int | None = option(512, "number of images, the same for every run; null: all")
    seed: int = option(0, "seed of the sample and of random numbers in the analysis")
    batch_size: int = option(256, "images per batch")
    statistics: Statistics = option(
        "frozen", "of normalization layers: the running ones, recomputed at each point, or each batch's own"
    )
    allow_random: bool = option(False, "measure one draw of a loss that is not deterministic")
    data_dir: Path | None = option(None, "directory of the data set; default the user's cache, else a download")
    download: bool = option(True, "download a data set that is not available")
    device: str = option("auto", "cpu, cuda, mps or auto")

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


def load_run(path: Path | str, **options: Any) -> TrainedRun:
    """The run in a directory; ``options`` are the fields of `MeasuredOn`.

    >>> run = load_run("runs/a", samples=256)
    >>> hessian_eigenvalues(run.objective).ratio
    """
    return TrainedRun(Path(path), MeasuredOn(**options))


class TrainedRun:
    """``config`` at once; ``model``, ``objective``, ``masks`` and what they need are read when first used.

    ``masks`` are those in use at the checkpoint, None for a run that has none. ``step`` counts the training steps
    before the checkpoint, ``mask_step`` is the one that the masks were made in.
    """

    def __init__(self, path: Path, on: MeasuredOn) -> None:
        self.directory, self.on = RunDirectory.existing(path), on
        self.config = self.directory.saved_config()
        self.notes: list[str] = []

    @property
    def path(self) -> Path:
        return self.directory.path

    # ---- weights and masks -------------------------------------------------------------------------------

    @cached_property
    def model(self) -> nn.Module:
        splits = self.splits
        with torch.random.fork_rng(devices=[]):
            model = models.build(self.config.model, splits.num_classes, splits.in_channels, splits.image_size)
        check_fits(model, self)
        model.load_state_dict(self.weights)
        return model.to(_device(self.on.device))

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The state dict of the model as it was tested: the moving average, where the run has one."""
        try:
            return weights_of(self._content)
        except KeyError as error:
            raise CheckpointError(f"{self._file} lacks {error}; it is not the {self._file.name} of a run") from None

    @property
    def step(self) -> int:
        steps = self.batches.steps
        if self.on.checkpoint == "best":
            return min(int(self._content["epoch"]) * steps, self.config.max_steps or self.config.epochs * steps)
        position = self._content["training"]["position"]
        return int(position["epoch"] * steps + position["step"])

    @property
    def masks(self) -> dict[str, Tensor] | None:
        return self._masks[1]

    @property
    def mask_step(self) -> int | None:
        return self._masks[0]

    @cached_property
    def _masks(self) -> tuple[int | None, dict[str, Tensor] | None]:
        if self.on.checkpoint == "last":
            return _masks_of(self._content)
        before = [(step, file) for step, file in mask_files(self.directory.masks) if step < self.step]
        if before:
            return before[-1][0], read_mask_file(before[-1][1])
        made, masks = _masks_of(checkpoint.load(self.directory.last)) if self.directory.last.exists() else (None, None)
        if made is not None and made >= self.step:
            self.notes.append("the mask in use at best.pt was not recorded; train with --record-masks true")
            return None, None
        return made, masks

    @property
    def _file(self) -> Path:
        return self.directory.best if self.on.checkpoint == "best" else self.directory.last

    @cached_property
    def _content(self) -> dict[str, Any]:
        if not self._file.exists():
            raise CheckpointError(
                f"{self._file} does not exist: the run has not finished an epoch; "
                f"continue it with: sparsesam train --resume --out {self.path}"
            )
        return checkpoint.load(self._file)

    # ---- images ------------------------------------------------------------------------------------------

    @cached_property
    def splits(self) -> Splits | FolderSplits:
        splits = load(self.config.dataset, self.on.data_dir, self.on.download, image_size=self.config.image_size)
        if splits.num_classes < 2:
            raise ValueError(
                f"{self.path}: the data set {self.config.dataset} has one class, so its loss is always 0; "
                "an analysis needs at least two"
            )
        return splits

    @cached_property
    def batches(self) -> Batches:
        return make_batches(self.config, self.splits, Share(), torch.device("cpu"), workers=0)

    @cached_property
    def objective(self) -> Objective:
        return Objective(
            self.model,
            _sample(self.batches.unaugmented(self.on.split), self.on),
            partial(cross_entropy, label_smoothing=self._smoothing),
            statistics=self.on.statistics,
            allow_random=self.on.allow_random,
        )

    @property
    def loss(self) -> str:
        return "cross-entropy" + (f", label smoothing {self._smoothing:g}" if self._smoothing else "")

    @property
    def _smoothing(self) -> float:
        return self.config.label_smoothing if self.on.split == "train" else 0.0

    def origin(self) -> Origin:
        """What the numbers were measured on."""
        return Origin(
            checkpoint=self.on.checkpoint,
            step=self.step,
            mask_step=self.mask_step,
            split=self.on.split,
            samples=self.objective.samples,
            seed=self.on.seed,
            loss=self.loss,
            statistics=self.on.statistics,
            device=str(next(self.model.parameters()).device),
            notes=self.notes,
        )


def check_fits(model: nn.Module, run: TrainedRun) -> None:
    """Raise CheckpointError if a run's weights do not fit a model, its own or another run's."""
    try:
        check_state(model, run.weights, str(run._file))
    except ValueError as error:
        reason = str(error).split("; give the model's own")[0]
        raise CheckpointError(
            f"{reason}; config.yaml says model {run.config.model}: did it, the data set or the model's code change "
            "after the training?"
        ) from None


def _masks_of(content: dict[str, Any]) -> tuple[int | None, dict[str, Tensor] | None]:
    _, own, tensors = split_own(content["training"]["optimizer"])
    if own is None or own["mask"] is None or not own["mask"]["is_made"]:
        return None, None
    return int(own["mask"]["last_step"]), tensors["mask"]


def _sample(images: Dataset[tuple[Tensor, Tensor]], on: MeasuredOn) -> list[tuple[Tensor, Tensor]]:
    count = len(images)  # type: ignore[arg-type]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(on.seed))
    chosen = order[: on.samples or count].sort().values
    return [_stacked([images[int(place)] for place in part]) for part in chosen.split(on.batch_size)]


def _stacked(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([image for image, _ in pairs]), torch.stack([label for _, label in pairs])


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device must be cpu, cuda, mps or auto and available, got {name!r}") from error
    return device
