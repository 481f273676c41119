"""A loaded data set: training and test images with labels, class names, and mean and std per channel."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class DataError(ValueError):
    """A file is missing or has unexpected content; the message names it, what was expected and what was found."""


class Labelled(NamedTuple):
    """(n, channels, height, width) uint8 images and their (n,) int64 labels."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class DatasetInfo:
    """``mean`` and ``std`` are per channel, of pixels scaled to [0, 1]. ``mirrored`` says that a mirrored image has the
    same class, so that training may flip it; a mirrored digit is not a digit.
    """

    _: KW_ONLY
    name: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mirrored: bool = True

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def in_channels(self) -> int:
        return len(self.mean)


@dataclass(frozen=True)
class Splits(DatasetInfo):
    """A data set in memory."""

    train: Labelled
    test: Labelled

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            labelled = Labelled(*getattr(self, part))  # accepts a plain pair
            object.__setattr__(self, part, labelled)
            self._check(f"{self.name}: {part}", *labelled)
        if missing := sorted(set(range(self.num_classes)) - set(self.train.labels.unique().tolist())):
            names = ", ".join(repr(self.classes[index]) for index in missing[:5])
            raise DataError(
                f"{self.name}: every class needs a training image, but {len(missing)} of {self.num_classes} have none, "
                f"such as {names}; are all files of the data set there?"
            )

    def _check(self, what: str, images: Tensor, labels: Tensor) -> None:
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != self.in_channels:
            raise DataError(
                f"{what} images must be uint8 of shape (n, {self.in_channels}, height, width), with a channel for each "
                f"number of `mean`, got {images.dtype} {tuple(images.shape)}"
            )
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            shape = f"({len(images)},)"
            raise DataError(f"{what} labels must be int64 of shape {shape}, got {labels.dtype} {tuple(labels.shape)}")
        if len(labels) == 0:
            raise DataError(f"{what} images must be at least one, got none; is the file empty?")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= self.num_classes:
            raise DataError(f"{what} labels must be in 0..{self.num_classes - 1}, got {low} to {high}")

    @property
    def image_size(self) -> int:
        return self.train.images.shape[-1]
