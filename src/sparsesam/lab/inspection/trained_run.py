"""A trained run to measure: its model, its loss over a fixed sample of images, and its masks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset

from sparsesam.analysis import Objective
from sparsesam.analysis.objective import Statistics
from sparsesam.checkpoint import split_own
from sparsesam.lab import models
from sparsesam.lab.data import FolderSplits, Splits
from sparsesam.lab.experiment import checkpoint
from sparsesam.lab.experiment.batches import Batches, Split, load_splits
from sparsesam.lab.experiment.config import Machine, RunEnvironment, TrainConfig
from sparsesam.lab.experiment.errors import CheckpointError, one_line
from sparsesam.lab.experiment.run import make_fabric
from sparsesam.lab.experiment.run_directory import RunDirectory, read_mask_file
from sparsesam.lab.experiment.setting_types import PositiveInt, option


@dataclass(frozen=True)
class EvalSettings(Machine):
    """The weights of a run to measure, and the images to measure them on."""

    checkpoint: Literal["last", "best"] = option(
        "last", "last.pt, or best.pt: best validation (or test) accuracy", group="weights and images"
    )
    split: Split = option("train", "images to measure on, without augmentation")
    samples: PositiveInt | None = option(512, "number of images, the same for every run; null: all")
    seed: int = option(0, "seed of the choice of images and of random numbers in the analysis")
    batch_size: PositiveInt = option(256, "images per batch")
    statistics: Statistics = option(
        "frozen", "statistics of normalization layers: running, recomputed at each point, or each batch's own"
    )
    allow_random: bool = option(False, "allow a loss that is not deterministic and measure one random draw of it")


def load_run(path: Path | str, *, weights: Path | None = None, **options: Any) -> TrainedRun:
    """Load the run in a directory, optionally with other ``weights``; ``options`` are fields of `EvalSettings`."""
    directory = RunDirectory.existing(Path(path))
    return TrainedRun(directory.path, EvalSettings(**options), weights)


class TrainedRun:
    """``config``, ``model``, ``objective``, ``masks`` and what they need are read when first used.

    ``masks`` are the masks in use at the checkpoint, None for a run without masks. ``step`` counts the training steps
    before the checkpoint, ``mask_step`` is the step that computed the masks.
    """

    def __init__(self, path: Path, on: EvalSettings, weights: Path | None = None) -> None:
        self.path, self.directory, self.on = path, RunDirectory(path), on
        self.file = weights or (self.directory.best if on.checkpoint == "best" else self.directory.last)
        self.is_own_file = weights is None
        self.environment = RunEnvironment(data_dir=on.data_dir, download=on.download, accelerator=on.accelerator)

    @cached_property
    def config(self) -> TrainConfig:
        return RunDirectory.existing(self.path).saved_config()

    @cached_property
    def model(self) -> nn.Module:
        splits = self.splits
        with torch.random.fork_rng(devices=[]):
            model = models.build_model(self.config.model, splits.num_classes, splits.in_channels, splits.image_size)
        try:
            model.load_state_dict(self.weights)
        except RuntimeError as error:
            raise CheckpointError(
                f"{self.file} does not fit the model in config.yaml, {self.config.model}: did it, the data set or the "
                f"model's code change after training? {one_line(error)}"
            ) from None
        return model.to(make_fabric(self.config, self.environment).device)

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The state dict that is evaluated: the moving average if the run has one."""
        return checkpoint.weights_of(self._content) if self.is_own_file else checkpoint.read_weights(self.file)

    @property
    def step(self) -> int:
        steps = self.batches.steps
        if "training" not in self._content:
            return min(int(self._content["epoch"]) * steps, self.config.total_steps(steps))
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
        """The step that computed the masks in use at the checkpoint, and the masks; None for both without masks."""
        if "training" in self._content:
            _, own, tensors = split_own(self._content["training"]["optimizer"])
            if own is None or own["mask"] is None or not own["mask"]["is_made"]:
                return None, None
            return int(own["mask"]["last_step"]), tensors["mask"]
        before = [(step, file) for step, file in self.directory.mask_files() if step < self.step]
        return (before[-1][0], read_mask_file(before[-1][1])) if before else (None, None)

    @cached_property
    def _content(self) -> dict[str, Any]:
        if not self.file.exists():
            raise CheckpointError(
                f"{self.file} does not exist: the run has not finished an epoch; "
                f"continue it with: sparsesam train --resume --out {self.path}"
            )
        return self.directory.load(self.file)

    @cached_property
    def splits(self) -> Splits | FolderSplits:
        return load_splits(self.config, self.environment)

    @cached_property
    def batches(self) -> Batches:
        return Batches(self.config, self.splits, torch.device("cpu"))

    @cached_property
    def objective(self) -> Objective:
        images, on = self.batches.unaugmented(self.on.split), self.on
        count = len(images)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(on.seed)
        chosen = torch.randperm(count, generator=generator)[: on.samples or count].sort().values.tolist()
        loader = DataLoader(Subset(images, chosen), batch_size=on.batch_size, generator=generator)
        loss_fn = partial(cross_entropy, label_smoothing=self._smoothing)
        batches = [tuple(batch) for batch in loader]
        return Objective(self.model, batches, loss_fn, statistics=on.statistics, allow_random=on.allow_random)

    @property
    def _smoothing(self) -> float:
        return self.config.label_smoothing if self.on.split == "train" else 0.0

    def origin(self) -> dict[str, Any]:
        """Returns what results are measured on, as ``made`` in docs/analyze.md."""
        has_mask = self.config.optimizer.startswith(("ssam", "sam-on"))
        is_unknown = has_mask and self.masks is None and "training" not in self._content
        return {
            "checkpoint": self.on.checkpoint,
            "step": self.step,
            "mask_step": self.mask_step,
            "split": self.on.split,
            "samples": self.objective.samples,
            "seed": self.on.seed,
            "loss": "cross-entropy" + (f", label smoothing {self._smoothing:g}" if self._smoothing else ""),
            "statistics": self.on.statistics,
            "device": str(next(self.model.parameters()).device),
            "notes": ["the mask in use at best.pt was not recorded; train with --record-masks true"] * is_unknown,
        }
