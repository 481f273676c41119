"""ImageNet-1K, or any folder like it: train/class/*.jpeg and val/class/*.jpeg."""

from __future__ import annotations

from pathlib import Path

from sparsesam.lab.data.errors import DataError, MissingData
from sparsesam.lab.data.image_folder import CentreCrop, ImageFolder, RandomResizedCrop, class_names
from sparsesam.lab.data.splits import FolderSplits

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def load_image_folder(data_dir: Path | None, *, size: int = 224, seed: int = 0) -> FolderSplits:
    """Training images by `RandomResizedCrop` with flips, test images by `CentreCrop`; both uint8, not normalized."""
    if data_dir is None:
        raise MissingData(
            "an image folder needs data_dir: a directory with train/CLASS/*.jpeg and val/CLASS/*.jpeg; "
            "ImageNet-1K is given out at https://www.image-net.org to those who ask, and cannot be downloaded from here"
        )
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ImportError("image folders need Pillow: pip install 'sparsesam[data]'") from error
    classes = class_names(data_dir / "train")
    return FolderSplits(
        train=ImageFolder(data_dir / "train", classes, RandomResizedCrop(size), seed=seed),
        test=ImageFolder(_test_folder(data_dir), classes, CentreCrop(size, resize=round(size * 256 / 224))),
        image_size=size,
        name="imagenet",
        classes=classes,
        mean=MEAN,
        std=STD,
    )


def _test_folder(data_dir: Path) -> Path:
    for name in ("val", "test"):
        if (data_dir / name).is_dir():
            return data_dir / name
    raise DataError(f"{data_dir}: expected train and val (or test) in it, found no val and no test")
