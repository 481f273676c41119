"""Batches of a run; their order and augmentation depend only on the seed, the epoch and the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from sparsesam.lab.data import DataError, FolderSplits, Splits, corrupt, flip_labels, load_dataset
from sparsesam.lab.data.augment import Augment, mixup, standard_augmentation
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.seeds import Purpose, derive, generator

Split = Literal["train", "val", "test"]

_EVALUATION_BATCH = 500


def load_splits(config: TrainConfig, environment: RunEnvironment, *, progress: bool = False) -> Splits | FolderSplits:
    """The data set of a run."""
    return load_dataset(
        config.dataset, environment.data_dir, environment.download, progress, image_size=config.image_size
    )


class Share(NamedTuple):
    """Which of the processes that train together this one is."""

    rank: int = 0
    world: int = 1

    def of(self, indices: Tensor) -> Tensor:
        """The part of this rank; those of the others are as large, to within one."""
        return indices.tensor_split(self.world)[self.rank]


class Batch(NamedTuple):
    """The part of a step's images that this rank computes on, normalized; ``global_size`` counts those of all ranks.

    ``labels`` are (n,) classes, or (n, classes) probabilities with mixup.
    """

    images: Tensor
    labels: Tensor
    global_size: int


class Batches(ABC):
    """The images of one run, in batches. ``sets`` are the images of each split, and the places of those it uses."""

    #: Whether every rank augments the whole batch and keeps its part, so that all draw what one process would.
    augments_whole: ClassVar[bool]

    def __init__(
        self,
        config: TrainConfig,
        splits: Splits | FolderSplits,
        sets: dict[Split, tuple[Any, Tensor]],
        share: Share,
        device: torch.device,
    ) -> None:
        if config.batch_size < share.world:
            raise ValueError(
                f"batch_size must be at least one image per process, {share.world}, got {config.batch_size}"
            )
        self.seed, self.batch_size, self.mixup = config.seed, config.batch_size, config.mixup
        self.augment, self.num_classes = _augmentation(config, splits), splits.num_classes
        self.sets, self.count, self.has_validation = sets, len(sets["train"][1]), config.val_size is not None
        self.share, self.device = share, device

    @property
    def steps(self) -> int:
        """Steps per epoch. A last batch of fewer images than there are processes is left out."""
        whole, rest = divmod(self.count, self.batch_size)
        return max(1, whole + (rest >= self.share.world))

    def train(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """An epoch's batches from ``first_step`` on."""
        images, chosen = self.sets["train"]
        order = chosen[torch.randperm(self.count, generator=generator(self.seed, Purpose.ORDER, epoch))]
        batches = order.split(self.batch_size)[first_step : self.steps]
        loaded = self._load(images, [batch if self.augments_whole else self.share.of(batch) for batch in batches])
        for step, (batch, (images, labels)) in enumerate(zip(batches, loaded, strict=True), start=first_step):
            rank = () if self.augments_whole else (self.share.rank,)
            drawn = generator(self.seed, Purpose.AUGMENT, epoch, step, *rank)
            images = self.augment(images, drawn)
            if self.mixup:
                images, labels = mixup(images, labels, alpha=self.mixup, num_classes=self.num_classes, generator=drawn)
            if self.augments_whole and self.share.world > 1:
                mine = self.share.of(torch.arange(len(batch), device=self.device))
                images, labels = images[mine], labels[mine]
            yield Batch(images, labels, len(batch))

    def evaluation(self, split: Literal["val", "test"]) -> Iterator[Batch]:
        """The validation or test images, or this rank's share of them."""
        images, chosen = self.sets[split]
        parts = [part for part in self.share.of(chosen).split(_EVALUATION_BATCH) if len(part)]
        for loaded, labels in self._load(images, parts):
            yield Batch(self.augment.plain(loaded), labels, len(chosen))

    def unaugmented(self, split: Split = "train") -> Dataset[tuple[Tensor, Tensor]]:
        """Single images, normalized only."""
        images, chosen = self.sets[split]
        return _Normalized(Subset(images, chosen.tolist()), self.augment, self.device)

    @abstractmethod
    def _load(self, images: Any, batches: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The images at these places, and their labels, on the training device."""


class InMemory(Batches):
    """All images on the training device; whole batches are augmented."""

    augments_whole = True

    def __init__(self, config: TrainConfig, splits: Splits, share: Share, device: torch.device) -> None:
        chosen, held_out = _choose(len(splits.train.labels), config)
        tested = subset(len(splits.test.labels), config.test_size)
        parts: dict[Split, tuple[Tensor, ...]] = {
            "train": _prepared(config, splits, chosen),
            "val": tuple(part[held_out] for part in splits.train),
            "test": tuple(part[tested] for part in splits.test),
        }
        sets: dict[Split, tuple[Any, Tensor]] = {
            split: (TensorDataset(*(tensor.to(device) for tensor in part)), torch.arange(len(part[1])))
            for split, part in parts.items()
        }
        super().__init__(config, splits, sets, share, device)

    def _load(self, images: Any, batches: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        return (images[places.to(self.device)] for places in batches)


class FromFolder(Batches):
    """Images that worker processes decode when they are needed; each rank decodes its own."""

    augments_whole = False

    def __init__(
        self, config: TrainConfig, splits: FolderSplits, share: Share, device: torch.device, workers: int
    ) -> None:
        if config.corruption_rate:
            raise ValueError(f"corruption_rate must be 0 for images from folders, got {config.corruption_rate}")
        self.folder, self.workers = copy(splits.train), workers
        self.folder.seed = derive(config.seed, Purpose.VIEWS)
        if config.augment == "none":
            self.folder.view = splits.test.view
        if config.label_noise:
            self.folder.labels = _noisy(config, torch.tensor(splits.train.labels), splits.num_classes).tolist()
        chosen, held_out = _choose(len(splits.train), config)
        unseen = copy(splits.train)
        unseen.view = splits.test.view
        tested = subset(len(splits.test), config.test_size)
        sets: dict[Split, tuple[Any, Tensor]] = {
            "train": (self.folder, chosen),
            "val": (unseen, held_out),
            "test": (splits.test, tested),
        }
        super().__init__(config, splits, sets, share, device)

    def train(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        self.folder.set_epoch(epoch)
        yield from super().train(epoch, first_step)

    def _load(self, images: Any, batches: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        on_gpu = self.device.type == "cuda"
        loader: DataLoader[Any] = DataLoader(
            images, batch_sampler=[part.tolist() for part in batches], num_workers=self.workers, pin_memory=on_gpu
        )
        try:
            for pixels, labels in loader:
                yield pixels.to(self.device, non_blocking=on_gpu), labels.to(self.device, non_blocking=on_gpu)
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
        images = corrupt(images, config.corruption_rate, config.corruption, drawn)
    return images, labels


def _noisy(config: TrainConfig, labels: Tensor, num_classes: int) -> Tensor:
    drawn = generator(config.seed, Purpose.LABEL_NOISE)
    return flip_labels(labels, fraction=config.label_noise, num_classes=num_classes, generator=drawn)


def subset(count: int, size: int | None) -> Tensor:
    """``size`` places of ``count``, the same for every seed of a run."""
    if size is None or size >= count:
        return torch.arange(count)
    return torch.randperm(count, generator=generator(0, Purpose.SUBSET))[:size].sort().values
