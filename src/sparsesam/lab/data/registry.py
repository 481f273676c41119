"""Data sets by name: ours, or any importable function."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path

from sparsesam.lab.data.cifar import CIFAR10, CIFAR100, load_cifar
from sparsesam.lab.data.digits import digits_splits
from sparsesam.lab.data.download import Progress
from sparsesam.lab.data.fashion_mnist import load_fashion_mnist
from sparsesam.lab.data.imagenet import load_image_folder
from sparsesam.lab.data.splits import FolderSplits, Splits

Loader = Callable[[Path | None, bool, Progress | None], Splits | FolderSplits]

DATASETS: dict[str, Loader] = {
    "digits": lambda data_dir, download, progress: digits_splits(),
    "fashion-mnist": load_fashion_mnist,
    "cifar10": partial(load_cifar, CIFAR10),
    "cifar100": partial(load_cifar, CIFAR100),
    "imagenet": lambda data_dir, download, progress: load_image_folder(data_dir),
}


def load(
    name: str,
    data_dir: str | PathLike[str] | None = None,
    download: bool = True,
    progress: Progress | None = None,
) -> Splits | FolderSplits:
    """The data set called ``name``, from ``data_dir`` if its files are there, else from the cache or the net.

    ``name`` may also be ``module:function`` of anything importable; the function is called with the directory (a
    Path or None) and returns `Splits` or `FolderSplits`. "imagenet" reads any ImageNet-style folder.
    """
    place = Path(data_dir).expanduser() if data_dir is not None else None
    if place is not None and not place.is_dir():
        raise ValueError(f"data_dir must be an existing directory, got {str(data_dir)!r}")
    if ":" in name:
        return _from_user(name, place)
    key = name.lower().replace("_", "-")
    if key not in DATASETS:
        nearest = difflib.get_close_matches(key, DATASETS, n=len(DATASETS), cutoff=0)
        raise ValueError(f"dataset must be one of {', '.join(map(repr, nearest))} or a module:function, got {name!r}")
    return DATASETS[key](place, download, progress)


def _from_user(name: str, data_dir: Path | None) -> Splits | FolderSplits:
    try:
        function = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"dataset must be an importable module:function, got {name!r}: {error}; "
            "PYTHONPATH=. makes the modules of the working directory importable"
        ) from error
    splits = function(data_dir)
    if not isinstance(splits, Splits | FolderSplits):
        raise TypeError(
            f"{name} must return sparsesam.lab.data.Splits or FolderSplits, got {type(splits).__name__}; "
            "Splits(train=Labelled(images, labels), test=…, name=…, classes=…, mean=…, std=…)"
        )
    return splits
