"""Data sets by name: ours, those of the Hugging Face hub, or any importable function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path

from sparsesam.lab.data.cifar import CIFAR10, CIFAR100, load_cifar
from sparsesam.lab.data.digits import load_digits
from sparsesam.lab.data.fashion_mnist import load_fashion_mnist
from sparsesam.lab.data.hugging_face import load_hugging_face
from sparsesam.lab.data.image_folder import load_image_folder
from sparsesam.lab.data.splits import FolderSplits, Splits
from sparsesam.lab.names import call_function, find_function, nearest

Loader = Callable[[Path | None, bool, bool], Splits]

IN_MEMORY: dict[str, Loader] = {
    "digits": lambda data_dir, download, progress: load_digits(),
    "fashion-mnist": load_fashion_mnist,
    "cifar10": partial(load_cifar, CIFAR10),
    "cifar100": partial(load_cifar, CIFAR100),
}
#: Images in folders, with the side in pixels that they are resized to unless asked otherwise.
FOLDERS = {"imagenet": 224, "tiny-imagenet": 64, "folder": 224}
DATASETS = (*IN_MEMORY, *FOLDERS)


def load_dataset(
    name: str,
    data_dir: str | PathLike[str] | None = None,
    download: bool = True,
    progress: bool = False,
    *,
    image_size: int | None = None,
) -> Splits | FolderSplits:
    """The data set called ``name``, from ``data_dir`` if its files are there, else from the cache or the net.

    ``name`` is one of `DATASETS`, ``hf/NAME`` for an image data set of the Hugging Face hub, or ``module:function``
    of anything importable; the function is called with the directory (a Path or None) and returns `Splits` or
    `FolderSplits`. ``progress`` draws a bar of a download; ``image_size`` is the side in pixels for data sets that are
    read from folders or the hub.
    """
    place = Path(data_dir).expanduser() if data_dir is not None else None
    if place is not None and not place.is_dir():
        raise ValueError(f"data_dir must be an existing directory, got {str(data_dir)!r}")
    if name.startswith("hf/"):
        return load_hugging_face(name.removeprefix("hf/"), place, download, size=image_size)
    key = name.lower().replace("_", "-")
    if key in FOLDERS:
        return load_image_folder(place, name=key, size=image_size or FOLDERS[key])
    if image_size is not None:
        raise ValueError(f"image_size must be null for {name}, got {image_size}: its images have a size of their own")
    if ":" in name:
        return _from_user(name, place)
    if key not in IN_MEMORY:
        known = f"{', '.join(DATASETS)}, hf/NAME or a module:function"
        raise ValueError(f"dataset must be one of {known}, got {name!r}; {nearest(key, DATASETS)}")
    return IN_MEMORY[key](place, download, progress)


def _from_user(name: str, data_dir: Path | None) -> Splits | FolderSplits:
    splits = call_function("dataset", name, find_function("dataset", name), data_dir)
    if not isinstance(splits, Splits | FolderSplits):
        raise ValueError(
            f"dataset {name} must return sparsesam.lab.data.Splits or FolderSplits, got {type(splits).__name__}; "
            "Splits(train=Labelled(images, labels), test=…, name=…, classes=…, mean=…, std=…)"
        )
    return splits
