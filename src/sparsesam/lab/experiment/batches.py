"""Batches of a run; their order and augmentation depend only on the seed, the epoch and the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from sparsesam.lab.data import (
    Augment,
    DataError,
    FolderSplits,
    Labelled,
    Splits,
    corrupt,
    flip_labels,
    load,
    standard_augmentation,
)
from sparsesam.lab.data.image_folder import ImageFolder
from sparsesam.lab.data.mixup import mixup
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.seeds import Purpose, derive, generator

Split = Literal["train", "val", "test"]

_EVALUATION_BATCH = 500


def load_splits(config: TrainConfig, environment: RunEnvironment, *, progress: bool = False) -> Splits | FolderSplits:
    """The data set of a run."""
    return load(config.dataset, environment.data_dir, environment.download, progress, image_size=config.image_size)


class Share(NamedTuple):
    """Which of the processes that train together this one is."""

    rank: int = 0
    world: int = 1

    def of(self, indices: Tensor) -> Tensor:
        """The part of this rank; those of the others are as large, to within one."""
        return indices.tensor_split(self.world)[self.rank]


class Batch(NamedTuple):
    """The part of a step's images, that this rank computes on, normalized, and the images of all ranks.

    ``labels`` are (n,) classes, or (n, classes) probabilities with mixup.
    """

    images: Tensor
    labels: Tensor
    of: int


class Batches(ABC):
    """The images of one run, in batches."""

    def __init__(self, config: TrainConfig, count: int, share: Share, device: torch.device) -> None:
        if config.batch_size < share.world:
            raise ValueError(
                f"batch_size must be at least one image per process, {share.world}, got {config.batch_size}"
            )
        self.seed, self.batch_size, self.count = config.seed, config.batch_size, count
        self.share, self.device, self.mixup = share, device, config.mixup
        self.has_validation = config.val_size is not None

    @property
    def steps(self) -> int:
        """Steps per epoch. A last batch of fewer images than there are processes is left out."""
        whole, rest = divmod(self.count, self.batch_size)
        return max(1, whole + (rest >= self.share.world))

    def order(self, epoch: int, first_step: int) -> Iterator[tuple[int, Tensor]]:
        """The step and the places of its images among the training images."""
        order = torch.randperm(self.count, generator=generator(self.seed, Purpose.ORDER, epoch))
        for step in range(first_step, self.steps):
            yield step, order[step * self.batch_size : (step + 1) * self.batch_size]

    @abstractmethod
    def train(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """An epoch's batches from ``first_step`` on."""

    @abstractmethod
    def evaluation(self, split: Literal["val", "test"]) -> Iterator[Batch]:
        """The validation or test images, or this rank's share of them."""

    @abstractmethod
    def unaugmented(self, split: Split = "train") -> Dataset[tuple[Tensor, Tensor]]:
        """Single images, normalized only."""

    def _mixed(self, images: Tensor, labels: Tensor, drawn: torch.Generator, num_classes: int) -> tuple[Tensor, Tensor]:
        if not self.mixup:
            return images, labels
        return mixup(images, labels, alpha=self.mixup, num_classes=num_classes, generator=drawn)


class InMemory(Batches):
    """All images on the training device; whole batches are augmented."""

    def __init__(self, config: TrainConfig, splits: Splits, share: Share, device: torch.device) -> None:
        self.augment = _augmentation(config, splits)
        self.num_classes = splits.num_classes
        chosen, held_out = _choose(len(splits.train.labels), config)
        images, labels = _prepared(config, splits, chosen)
        tested = subset(len(splits.test.labels), config.test_size)
        self._sets: dict[Split, Labelled] = {
            "train": Labelled(images.to(device), labels.to(device)),
            "val": Labelled(*(part[held_out].to(device) for part in splits.train)),
            "test": Labelled(*(part[tested].to(device) for part in splits.test)),
        }
        super().__init__(config, len(labels), share, device)

    @property
    def images(self) -> Tensor:
        return self._sets["train"].images

    @property
    def labels(self) -> Tensor:
        return self._sets["train"].labels

    def train(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        for step, places in self.order(epoch, first_step):
            # Every rank augments the whole batch and keeps its part, so that all draw what one process would.
            drawn = generator(self.seed, Purpose.AUGMENT, epoch, step)
            chosen = places.to(self.device)
            images = self.augment(self.images[chosen], drawn)
            images, labels = self._mixed(images, self.labels[chosen], drawn, self.num_classes)
            if self.share.world > 1:
                mine = self.share.of(torch.arange(len(places), device=self.device))
                images, labels = images[mine], labels[mine]
            yield Batch(images, labels, len(places))

    def evaluation(self, split: Literal["val", "test"]) -> Iterator[Batch]:
        images, labels = self._sets[split]
        mine = self.share.of(torch.arange(len(labels), device=self.device))
        for chosen in mine.split(_EVALUATION_BATCH):
            yield Batch(self.augment.plain(images[chosen]), labels[chosen], len(labels))

    def unaugmented(self, split: Split = "train") -> Dataset[tuple[Tensor, Tensor]]:
        return _Normalized(TensorDataset(*self._sets[split]), self.augment, self.device)


class FromFolder(Batches):
    """Images that worker processes decode when they are needed."""

    def __init__(
        self, config: TrainConfig, splits: FolderSplits, share: Share, device: torch.device, workers: int
    ) -> None:
        if config.corruption_rate:
            raise ValueError(f"corruption_rate must be 0 for images from folders, got {config.corruption_rate}")
        self.augment = _augmentation(config, splits)
        self.num_classes = splits.num_classes
        self.folder = copy(splits.train)
        self.folder.seed = derive(config.seed, Purpose.VIEWS)
        if config.augment == "none":
            self.folder.view = splits.test.view
        if config.label_noise:
            self.folder.labels = _noisy(config, torch.tensor(splits.train.labels), splits.num_classes).tolist()
        self.chosen, held_out = _choose(len(splits.train), config)
        unseen = copy(splits.train)
        unseen.view = splits.test.view
        self._sets: dict[Split, tuple[ImageFolder, Tensor]] = {
            "train": (self.folder, self.chosen),
            "val": (unseen, held_out),
            "test": (splits.test, subset(len(splits.test), config.test_size)),
        }
        self.workers = workers
        super().__init__(config, len(self.chosen), share, device)

    def train(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        self.folder.set_epoch(epoch)
        steps = [(step, self.chosen[places]) for step, places in self.order(epoch, first_step)]
        loaded = self._load(self.folder, [self.share.of(places) for _, places in steps])
        for (step, places), (images, labels) in zip(steps, loaded, strict=True):
            drawn = generator(self.seed, Purpose.AUGMENT, epoch, step, self.share.rank)
            images, labels = self._mixed(self.augment(images, drawn), labels, drawn, self.num_classes)
            yield Batch(images, labels, len(places))

    def evaluation(self, split: Literal["val", "test"]) -> Iterator[Batch]:
        folder, chosen = self._sets[split]
        parts = [part for part in self.share.of(chosen).split(_EVALUATION_BATCH) if len(part)]
        for images, labels in self._load(folder, parts):
            yield Batch(self.augment.plain(images), labels, len(chosen))

    def unaugmented(self, split: Split = "train") -> Dataset[tuple[Tensor, Tensor]]:
        folder, chosen = self._sets[split]
        return _Normalized(Subset(folder, chosen.tolist()), self.augment, self.device)

    def _load(self, folder: ImageFolder, batches: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        on_gpu = self.device.type == "cuda"
        loader: DataLoader[Any] = DataLoader(
            folder, batch_sampler=[part.tolist() for part in batches], num_workers=self.workers, pin_memory=on_gpu
        )
        try:
            for images, labels in loader:
                yield images.to(self.device, non_blocking=on_gpu), labels.to(self.device, non_blocking=on_gpu)
        except DataError as error:  # of a worker, with its traceback as text around the message
            raise DataError(str(error).rpartition("DataError: ")[2].strip()) from None


def make_batches(
    config: TrainConfig, splits: Splits | FolderSplits, share: Share, device: torch.device, workers: int
) -> Batches:
    if isinstance(splits, Splits):
        return InMemory(config, splits, share, device)
    return FromFolder(config, splits, share, device, workers)


class _Normalized(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, images: Any, augment: Augment, device: torch.device) -> None:
        self.images, self.augment, self.device = images, augment, device

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.images[index]
        return self.augment.plain(image[None].to(self.device))[0], torch.as_tensor(label, device=self.device)


def _augmentation(config: TrainConfig, splits: Splits | FolderSplits) -> Augment:
    if config.augment == "none":
        augment = Augment(splits.mean, splits.std)
    else:
        augment = standard_augmentation(splits, cutout=config.augment == "standard")
    return replace(augment, randaugment=config.randaugment, randaugment_magnitude=config.randaugment_magnitude)


def _choose(count: int, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Which of ``count`` training images are trained on, and which are held out for validation."""
    if config.val_size is None:
        return subset(count, config.train_size), torch.arange(0)
    if config.val_size >= count:
        raise ValueError(f"val_size must be below the number of training images, {count}, got {config.val_size}")
    shuffled = torch.randperm(count, generator=generator(0, Purpose.VALIDATION))
    held_out, rest = shuffled[: config.val_size].sort().values, shuffled[config.val_size :].sort().values
    return rest[subset(len(rest), config.train_size)], held_out


def _prepared(config: TrainConfig, splits: Splits, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen training images and labels, with the config's noise and corruption."""
    images, labels = splits.train.images[chosen], splits.train.labels[chosen]
    if config.label_noise:
        labels = _noisy(config, labels, splits.num_classes)
    if config.corruption_rate:
        drawn = generator(config.seed, Purpose.CORRUPTION)
        images = corrupt(images, config.corruption_rate, config.corruption, drawn).images
    return images, labels


def _noisy(config: TrainConfig, labels: Tensor, num_classes: int) -> Tensor:
    drawn = generator(config.seed, Purpose.LABEL_NOISE)
    return flip_labels(labels, fraction=config.label_noise, num_classes=num_classes, generator=drawn)


def subset(count: int, size: int | None) -> Tensor:
    """``size`` places of ``count``, the same for every seed of a run."""
    if size is None or size >= count:
        return torch.arange(count)
    return torch.randperm(count, generator=generator(0, Purpose.SUBSET))[:size].sort().values
