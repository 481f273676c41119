"""Data sets of image files, decoded on demand with Pillow: ImageNet-1K, Tiny ImageNet, or any folder with a subfolder
for each class.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sparsesam.integrations.extras import required_by
from sparsesam.lab.data.splits import DataError, DatasetInfo

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff")
#: The default side in pixels, and where to get the images.
SOURCES = {
    "imagenet": (224, "ImageNet-1K is available on request from https://www.image-net.org and cannot be downloaded"),
    "tiny-imagenet": (64, "unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip and pass that folder"),
    "folder": (224, "use any images, at least one per class in both train and val"),
}
View = Callable[["Image", torch.Generator], "Image"]
"""Crops and resizes an image; random choices come from the generator."""


class ImageFolder(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of a (3, size, size) uint8 image and its label. For an animated file the first frame is used.

    The view of image i is drawn from a generator seeded with (seed, epoch, i), so it does not depend on the number of
    workers or their order. Set ``epoch`` before a DataLoader starts its workers.
    """

    def __init__(self, paths: list[str], labels: Sequence[int] | Tensor, view: View, seed: int = 0) -> None:
        self.paths, self.labels, self.view, self.seed, self.epoch = paths, torch.as_tensor(labels), view, seed, 0

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        entropy = np.random.SeedSequence((self.seed, self.epoch, index)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(entropy[0] >> 1))
        seen = self.view(_decode(self.paths[index]), generator)
        return torch.from_numpy(np.array(seen)).permute(2, 0, 1).contiguous(), self.labels[index]


@dataclass(frozen=True)
class FolderSplits(DatasetInfo):
    """A data set too large for memory: map-style datasets, decoded in a DataLoader's workers."""

    train: ImageFolder
    test: ImageFolder
    image_size: int


def load_image_folder(name: str, data_dir: Path | None, image_size: int | None = None) -> FolderSplits:
    """Load training images with `random_resized_crop`, test images with `center_crop`; both uint8, not normalized.

    The training images are in ``data_dir/train/CLASS``; the test images in ``val/CLASS`` or ``test/CLASS``, or, as in
    Tiny ImageNet, in ``val/images`` with their classes in ``val/val_annotations.txt``.
    """
    default_size, source = SOURCES[name]
    if data_dir is None:
        raise DataError(
            f"{name} needs data_dir (--data-dir DIR), with train/CLASS/*.jpeg and val/CLASS/*.jpeg in it; {source}"
        )
    with required_by(f"the data set {name}", "'sparsesam[data]'"):
        import PIL  # noqa: F401
    test = next((data_dir / part for part in ("val", "test") if (data_dir / part).is_dir()), data_dir / "val")
    trained, annotations = _by_class(data_dir / "train"), test / "val_annotations.txt"
    tested = _annotated(annotations) if annotations.is_file() else _by_class(test)
    labels = {name: label for label, name in enumerate(dict.fromkeys(name for _, name in trained))}
    kinds = {name for _, name in tested}
    # Annotations may be of a part of the images, which need not have every class; a missing folder is a mistake.
    is_part = annotations.is_file() and bool(kinds)
    if odd := sorted(kinds - labels.keys() if is_part else kinds ^ labels.keys()):
        raise DataError(
            f"{test}: expected the {len(labels)} classes of the training images; missing or unknown: "
            f"{', '.join(odd[:5])}"
        )
    size = image_size or default_size

    def images(pairs: list[tuple[str, str]], view: Callable[..., Image]) -> ImageFolder:
        return ImageFolder([path for path, _ in pairs], [labels[name] for _, name in pairs], partial(view, size=size))

    return FolderSplits(
        train=images(trained, random_resized_crop),
        test=images(tested, center_crop),
        image_size=size,
        name=name,
        classes=tuple(labels),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )


def _by_class(root: Path) -> list[tuple[str, str]]:
    """Returns the files in ROOT/CLASS, or ROOT/CLASS/images, with their classes, both sorted."""
    found: list[tuple[str, str]] = []
    for name in sorted(entry.name for entry in os.scandir(root) if entry.is_dir()) if root.is_dir() else ():
        folder = root / name / "images" if (root / name / "images").is_dir() else root / name
        paths = sorted(entry.path for entry in os.scandir(folder) if entry.name.lower().endswith(SUFFIXES))
        if not paths:
            raise DataError(f"{folder}: expected images ({', '.join(SUFFIXES)}), found none")
        found += [(path, name) for path in paths]
    if not found:
        raise DataError(f"{root}: expected a folder with one subfolder of images per class, found none")
    return found


def _annotated(annotations: Path) -> list[tuple[str, str]]:
    """Read files and their classes from lines of file name, class and box, separated by tabs."""
    lines = [[*line.split("\t"), ""] for line in annotations.read_text().splitlines()]
    return [(str(annotations.parent / "images" / name), kind) for name, kind, *_ in lines]


def _decode(path: str) -> Image:
    import PIL.Image

    try:
        with PIL.Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
        raise DataError(f"{path}: expected a complete image, found one that cannot be decoded ({error})") from error


def random_resized_crop(image: Image, generator: torch.Generator, *, size: int) -> Image:
    """Crop to a `random_box`, resize to a square, and mirror with probability 0.5."""
    from PIL.Image import Resampling, Transpose

    seen = image.resize((size, size), Resampling.BILINEAR, box=random_box(image.size, generator))
    is_mirrored = torch.rand((), generator=generator).item() < 0.5
    return seen.transpose(Transpose.FLIP_LEFT_RIGHT) if is_mirrored else seen


def random_box(extent: tuple[int, int], generator: torch.Generator) -> tuple[int, int, int, int]:
    """Returns left, top, right and bottom of a box with 8 to 100 % of the image's area and an aspect of 3/4 to 4/3.

    The area is uniform, the aspect log-uniform. Ten boxes are tried; if none fits in the image, the largest central box
    with an allowed aspect is used.
    """
    width, height = extent
    low, high = 3 / 4, 4 / 3
    for _ in range(10):
        area, aspect, x, y = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
        area = width * height * (0.08 + area * (1.0 - 0.08))
        aspect = low * (high / low) ** aspect
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(x * (width - w + 1)), int(y * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * high)), min(height, round(width / low))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def center_crop(image: Image, generator: torch.Generator, *, size: int, square: bool = False) -> Image:
    """Resize the shorter side, or with ``square`` both, to 256 / 224 of ``size``, and crop the central square."""
    from PIL.Image import Resampling

    shorter = round(size * 256 / 224)
    width = height = shorter
    if not square:
        width, height = (max(shorter, round(side * shorter / min(image.size))) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    return image.resize((width, height), Resampling.BILINEAR).crop((left, top, left + size, top + size))
