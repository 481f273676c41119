"""Data sets of image files: ImageNet-1K, Tiny ImageNet as published, or any folder with a subfolder per class."""

from __future__ import annotations

from pathlib import Path

from sparsesam.lab.data.errors import DataError, MissingData
from sparsesam.lab.data.image_folder import CentreCrop, ImageFolder, RandomResizedCrop, class_names
from sparsesam.lab.data.splits import FolderSplits

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SOURCES = {
    "imagenet": "ImageNet-1K is available on request from https://www.image-net.org and cannot be downloaded from here",
    "tiny-imagenet": "unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip and pass the folder tiny-imagenet-200",
    "folder": "any images will do, at least one per class in each of the two",
}


def load_image_folder(data_dir: Path | None, *, name: str = "folder", size: int = 224, seed: int = 0) -> FolderSplits:
    """Training images by `RandomResizedCrop` with flips, test images by `CentreCrop`; both uint8, not normalized.

    The training images are in ``data_dir/train/CLASS``; the test images in ``val/CLASS`` or ``test/CLASS``, or, as
    Tiny ImageNet is published, in ``val/images`` with their classes in ``val/val_annotations.txt``.
    """
    if data_dir is None:
        raise MissingData(
            f"{name} needs data_dir (--data-dir DIR), a directory with train/CLASS/*.jpeg and val/CLASS/*.jpeg; "
            f"{SOURCES[name]}"
        )
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ImportError("image folders need Pillow: pip install 'sparsesam[data]'") from error
    classes = class_names(data_dir / "train")
    crop, centre = RandomResizedCrop(size), CentreCrop(size, resize=round(size * 256 / 224))
    train = ImageFolder(data_dir / "train", classes, crop, seed=seed)
    folder = _test_folder(data_dir)
    annotations = folder / "val_annotations.txt"
    if annotations.is_file():
        test = ImageFolder.of_files(_annotated(annotations, classes), centre)
    else:
        test = ImageFolder(folder, classes, centre)
    return FolderSplits(
        train=train,
        test=test,
        image_size=size,
        name=name,
        classes=classes,
        mean=MEAN,
        std=STD,
    )


def _test_folder(data_dir: Path) -> Path:
    for name in ("val", "test"):
        if (data_dir / name).is_dir():
            return data_dir / name
    raise DataError(f"{data_dir}: expected train and val (or test) in it, found no val and no test")


def _annotated(annotations: Path, classes: tuple[str, ...]) -> list[tuple[str, int]]:
    """Files and labels from lines of a file's name, its class and a box, separated by tabs."""
    labels = {name: label for label, name in enumerate(classes)}
    found = []
    for number, line in enumerate(annotations.read_text().splitlines(), start=1):
        name, _, rest = line.partition("\t")
        kind = rest.partition("\t")[0]
        if kind not in labels:
            raise DataError(f"{annotations}: line {number}: expected a file and one of the classes, found {line!r}")
        found.append((str(annotations.parent / "images" / name), labels[kind]))
    if not found:
        raise DataError(f"{annotations}: expected a line for each image, found none")
    return found
