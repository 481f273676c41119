"""Data sets by name: scikit-learn's digits, files, the Hugging Face hub, or any importable function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path

import torch

from sparsesam.integrations.extras import required_by
from sparsesam.lab.data.hugging_face import load_hugging_face
from sparsesam.lab.data.image_folder import FolderSplits, load_image_folder
from sparsesam.lab.data.published import CIFAR10, CIFAR100, FASHION_MNIST, load_published
from sparsesam.lab.data.splits import Labelled, Splits
from sparsesam.lab.names import accepted, call_function, find_function, look_up


def load_dataset(
    name: str,
    data_dir: str | PathLike[str] | None = None,
    download: bool = True,
    progress: bool = False,
    *,
    image_size: int | None = None,
) -> Splits | FolderSplits:
    """Load the data set ``name``, from ``data_dir`` if its files are there, else from the cache or a download.

    ``name`` is one of `DATASETS`, ``hf/NAME`` for an image data set of the Hugging Face hub, or an importable
    ``module:function``, which is called with the directory (a Path or None) and returns `Splits` or `FolderSplits`.
    ``progress`` shows a progress bar during downloads; ``image_size`` is the side in pixels for data sets from folders
    or the hub.
    """
    place = Path(data_dir).expanduser() if data_dir is not None else None
    if place is not None and not place.is_dir():
        raise ValueError(f"data_dir must be an existing directory, got {str(data_dir)!r}")
    loader: Callable[..., Splits | FolderSplits]
    if name.startswith("hf/"):
        loader = partial(load_hugging_face, name.removeprefix("hf/"))
    elif ":" in name:
        loader = partial(_from_user, name)
    else:
        loader = look_up("dataset", name, DATASETS, others="hf/NAME")
    options = {"data_dir": place, "download": download, "progress": progress, "image_size": image_size}
    taken = accepted(loader, options)
    if image_size is not None and "image_size" not in taken:
        raise ValueError(f"image_size must be null for {name}, got {image_size}: its images have a fixed size")
    return loader(**taken)


def load_digits() -> Splits:
    """Load scikit-learn's 8x8 handwritten digits: 1000 to train, 797 to test, stratified; 0..16 scaled to 0..255."""
    with required_by("the data set digits", "'sparsesam[data]'"):
        from sklearn import datasets
        from sklearn.model_selection import train_test_split
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = (torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16 * 255).round().to(torch.uint8)
    places = train_test_split(range(len(labels)), train_size=1000, stratify=labels, random_state=0)
    train, test = (Labelled(images[chosen], torch.tensor(labels[chosen])) for chosen in places)
    classes = tuple("0123456789")
    return Splits(train, test, name="digits", classes=classes, mean=(0.3049,), std=(0.3754,), mirrored=False)


def _from_user(name: str, data_dir: Path | None) -> Splits | FolderSplits:
    splits = call_function("dataset", name, find_function("dataset", name), data_dir)
    if not isinstance(splits, Splits | FolderSplits):
        raise ValueError(
            f"dataset {name} must return sparsesam.lab.data.Splits or FolderSplits, got {type(splits).__name__}; "
            "Splits(train=Labelled(images, labels), test=…, name=…, classes=…, mean=…, std=…)"
        )
    return splits


DATASETS: dict[str, Callable[..., Splits | FolderSplits]] = {
    "digits": load_digits,
    "fashion-mnist": partial(load_published, FASHION_MNIST),
    "cifar10": partial(load_published, CIFAR10),
    "cifar100": partial(load_published, CIFAR100),
    "imagenet": partial(load_image_folder, "imagenet"),
    "tiny-imagenet": partial(load_image_folder, "tiny-imagenet"),
    "folder": partial(load_image_folder, "folder"),
}
