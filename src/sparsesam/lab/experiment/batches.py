"""Batches of a run. Their order and augmentation depend only on the seed, the epoch and the step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sparsesam.lab.data import DataError, FolderSplits, Labelled, Splits, corrupt, flip_labels, load_dataset
from sparsesam.lab.data.augment import Augment, mixup, standard_augmentation
from sparsesam.lab.data.image_folder import ImageFolder, center_crop
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.seeds import Purpose, derive_seed, generator

Split = Literal["train", "val", "test"]

_EVALUATION_BATCH = 500


def load_splits(config: TrainConfig, environment: RunEnvironment, *, progress: bool = False) -> Splits | FolderSplits:
    return load_dataset(
        config.dataset, environment.data_dir, environment.download, progress, image_size=config.image_size
    )


class Batch(NamedTuple):
    """Normalized images of one step on this rank; ``global_size`` is the number of images on all ranks.

    ``labels`` are (n,) classes, or (n, classes) probabilities with mixup.
    """

    images: Tensor
    labels: Tensor
    global_size: int


class Batches:
    """The images of one run, in batches.

    An in-memory data set is moved to the training device; every rank augments the whole batch and keeps its part, so
    the images are the same as with one process. Image files are decoded by ``workers`` processes; each rank decodes
    its own part.
    """

    def __init__(
        self,
        config: TrainConfig,
        splits: Splits | FolderSplits,
        device: torch.device,
        *,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
    ) -> None:
        if config.batch_size < world:
            raise ValueError(f"batch_size must be at least one image per process, {world}, got {config.batch_size}")
        self.config, self.device, self.rank, self.world, self.workers = config, device, rank, world, workers
        self.num_classes, self.augment = splits.num_classes, Augment(splits.mean, splits.std)
        if config.augment != "none":
            self.augment = standard_augmentation(splits, cutout=config.augment == "standard")
        self.in_memory = isinstance(splits, Splits)
        self.sets = _sets(config, splits, device)
        self.count = len(self.sets["train"])

    @property
    def steps(self) -> int:
        """Steps per epoch. A last batch of fewer images than processes, or than others (``drop_last``), is left out."""
        whole, rest = divmod(self.count, self.config.batch_size)
        return max(1, whole + (rest >= self.world and not self.config.drop_last))

    def share(self, whole: Tensor) -> Tensor:
        """Returns this rank's part; the sizes of the parts differ by at most one."""
        return whole.tensor_split(self.world)[self.rank]

    def train(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from ``first_step`` on."""
        images, order = self.sets["train"], generator(self.config.seed, Purpose.ORDER, epoch)
        shuffled = torch.randperm(self.count, generator=order).split(self.config.batch_size)
        batches = parts = list(shuffled[first_step : self.steps])
        place: tuple[int, ...] = ()
        if not self.in_memory:
            images.epoch = epoch
            parts, place = [self.share(batch) for batch in batches], (self.rank,)
        loaded = zip(batches, self._load(images, parts), strict=True)
        for step, (batch, (pixels, labels)) in enumerate(loaded, start=first_step):
            drawn = generator(self.config.seed, Purpose.AUGMENT, epoch, step, *place)
            pixels = self.augment(pixels, drawn)
            if alpha := self.config.mixup:
                pixels, labels = mixup(pixels, labels, alpha=alpha, num_classes=self.num_classes, generator=drawn)
            if self.in_memory and self.world > 1:
                pixels, labels = self.share(pixels), self.share(labels)
            yield Batch(pixels, labels, len(batch))

    def evaluation(self, split: Literal["val", "test"]) -> Iterator[Batch]:
        """Yield this rank's share of the validation or test images."""
        count = len(self.sets[split])
        parts = [part for part in self.share(torch.arange(count)).split(_EVALUATION_BATCH) if len(part)]
        for pixels, labels in self._load(self.sets[split], parts):
            yield Batch(self.augment.plain(pixels), labels, count)

    def unaugmented(self, split: Split = "train") -> Dataset[tuple[Tensor, Tensor]]:
        """Returns a dataset of single images, normalized but not augmented; from folders as test images are."""
        images = self.sets[split]
        if not self.in_memory:
            images = ImageFolder(images.paths, images.labels, self.sets["test"].view)
        return _Normalized(images, self.augment, self.device)

    def for_fisher(self) -> Dataset[tuple[Tensor, Tensor]]:
        """Returns the training images for the Fisher information, with ``fisher_augment`` each augmented once."""
        if not self.config.fisher_augment:
            return self.unaugmented()
        return _Normalized(self.sets["train"], self.augment, self.device, self.config.seed)

    def _load(self, images: Any, batches: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the images at these indices and their labels, on the training device."""
        if self.in_memory:
            yield from (images[places.to(self.device)] for places in batches)
            return
        on_gpu, places = self.device.type == "cuda", [part.tolist() for part in batches]
        loader: Any = DataLoader(images, batch_sampler=places, num_workers=self.workers, pin_memory=on_gpu)
        try:
            for pixels, labels in loader:
                yield pixels.to(self.device, non_blocking=on_gpu), labels.to(self.device, non_blocking=on_gpu)
        except DataError as error:  # from a worker: the message contains its traceback as text
            raise DataError(str(error).rpartition("DataError: ")[2].strip()) from None


class _Normalized(Dataset[tuple[Tensor, Tensor]]):
    """Single images; with a ``seed`` augmented, an image always in the same way, so that a resumed run has the same."""

    def __init__(self, images: Any, augment: Augment, device: torch.device, seed: int | None = None) -> None:
        self.images, self.augment, self.device, self.seed = images, augment, device, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.images[index]
        pixels = image[None].to(self.device)
        drawn = None if self.seed is None else generator(self.seed, Purpose.FISHER, index)
        seen = self.augment.plain(pixels) if drawn is None else self.augment(pixels, drawn)
        return seen[0], torch.as_tensor(label, device=self.device)


def _sets(config: TrainConfig, splits: Splits | FolderSplits, device: torch.device) -> dict[Split, Any]:
    """Returns the images of each split that the run uses; training images have the config's noise and corruption.

    Validation images from folders are cropped and resized like test images.
    """
    if config.corruption_rate and isinstance(splits, FolderSplits):
        raise ValueError(f"corruption_rate must be 0 for images from folders, got {config.corruption_rate}")
    count = len(splits.train.labels)
    if config.val_size is not None and config.val_size >= count:
        raise ValueError(f"val_size must be below the number of training images, {count}, got {config.val_size}")
    held_out = _subset(count, config.val_size or 0, Purpose.VALIDATION)
    rest = torch.ones(count, dtype=torch.bool).index_fill(0, held_out, False).nonzero()[:, 0]
    tested = _subset(len(splits.test.labels), config.test_size)
    sets: dict[Split, Any] = {"train": rest[_subset(len(rest), config.train_size)], "val": held_out, "test": tested}
    cropped = partial(center_crop, size=splits.image_size, square=config.test_resize == "square")
    for split, part in sets.items():
        source: Labelled | ImageFolder = splits.test if split == "test" else splits.train
        labels, is_train = source.labels[part], split == "train"
        if is_train and config.label_noise:
            drawn = generator(config.seed, Purpose.LABEL_NOISE)
            labels = flip_labels(labels, config.label_noise, splits.num_classes, drawn)
        if isinstance(source, ImageFolder):
            paths = [source.paths[place] for place in part.tolist()]
            view = source.view if is_train and config.augment != "none" else cropped
            sets[split] = ImageFolder(paths, labels, view, seed=derive_seed(config.seed, Purpose.VIEWS))
            continue
        images = source.images[part]
        if is_train and config.corruption_rate:
            drawn = generator(config.seed, Purpose.CORRUPTION)
            images = corrupt(images, config.corruption_rate, config.corruption, drawn)
        sets[split] = TensorDataset(images.to(device), labels.to(device))
    return sets


def _subset(count: int, size: int | None, purpose: Purpose = Purpose.SUBSET) -> Tensor:
    """Returns ``size`` of ``count`` indices, the same for every seed of a run."""
    if size is None or size >= count:
        return torch.arange(count)
    return torch.randperm(count, generator=generator(0, purpose))[:size].sort().values
