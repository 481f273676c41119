"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) in their official binary and python layouts: 32x32, three colours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock

from sparsesam.lab.data.download import Remote, cache_dir, obtain, unpack, verify
from sparsesam.lab.data.restricted_pickle import read_pickle
from sparsesam.lab.data.splits import DataError, DatasetInfo, Labelled, Splits

PIXELS = 3 * 32 * 32

# The classes, in the order of their labels; of CIFAR-100 the fine ones.
# fmt: off
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

CIFAR100_CLASSES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle",
    "bowl", "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle",
    "chair", "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur",
    "dolphin", "elephant", "flatfish", "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard",
    "lamp", "lawn_mower", "leopard", "lion", "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain",
    "mouse", "mushroom", "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree",
    "plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road", "rocket",
    "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider",
    "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone", "television", "tiger",
    "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman", "worm",
)
# fmt: on


@dataclass(frozen=True)
class Layout:
    """One way the files are published.

    ``label_bytes`` precede the pixels of each binary record and the last of them is the label; in a pickle the
    label is called ``label_key`` instead. The layout is binary where ``label_key`` is None.
    """

    archive: Remote
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_bytes: int = 1
    label_key: str | None = None


@dataclass(frozen=True)
class Cifar(DatasetInfo):
    """What distinguishes the two data sets. The first layout is the one that is downloaded."""

    layouts: tuple[Layout, ...]
    train_records: int = 50_000
    test_records: int = 10_000


HOST = "https://www.cs.toronto.edu/~kriz"
_TEN = tuple(f"data_batch_{number}" for number in range(1, 6))

CIFAR10 = Cifar(
    name="cifar10",
    classes=CIFAR10_CLASSES,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    layouts=(
        Layout(
            archive=Remote(f"{HOST}/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
            folder="cifar-10-batches-bin",
            train=tuple(f"{name}.bin" for name in _TEN),
            test=("test_batch.bin",),
        ),
        Layout(
            archive=Remote(f"{HOST}/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
            folder="cifar-10-batches-py",
            train=_TEN,
            test=("test_batch",),
            label_key="labels",
        ),
    ),
)

CIFAR100 = Cifar(
    name="cifar100",
    classes=CIFAR100_CLASSES,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    layouts=(
        Layout(
            archive=Remote(f"{HOST}/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
            folder="cifar-100-binary",
            train=("train.bin",),
            test=("test.bin",),
            label_bytes=2,
        ),
        Layout(
            archive=Remote(f"{HOST}/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
            folder="cifar-100-python",
            train=("train",),
            test=("test",),
            label_key="fine_labels",
        ),
    ),
)


def load_cifar(cifar: Cifar, data_dir: Path | None = None, download: bool = True, progress: bool = False) -> Splits:
    """From either layout in ``data_dir`` or its usual subfolder, else from the cache, else from an archive."""
    cache = cache_dir() / cifar.name
    found = _find(cifar, data_dir) if data_dir else None
    layout, folder = found or _find(cifar, cache) or _from_archive(cifar, cache, data_dir, download, progress)
    return Splits(
        train=_read(folder, layout.train, layout, cifar.train_records),
        test=_read(folder, layout.test, layout, cifar.test_records),
        name=cifar.name,
        classes=cifar.classes,
        mean=cifar.mean,
        std=cifar.std,
    )


def _find(cifar: Cifar, root: Path) -> tuple[Layout, Path] | None:
    """The first layout of which any file is there; that all of them are is seen when they are read."""
    candidates = ((layout, folder) for layout in cifar.layouts for folder in (root / layout.folder, root))
    return next((pair for pair in candidates if any((pair[1] / name).is_file() for name in _files(pair[0]))), None)


def _files(layout: Layout) -> tuple[str, ...]:
    return layout.train + layout.test


def _from_archive(
    cifar: Cifar, cache: Path, data_dir: Path | None, download: bool, progress: bool
) -> tuple[Layout, Path]:
    """Unpack an archive into the cache: the user's if there is one, otherwise a downloaded one, which then goes."""
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "unpack.lock"):
        if ready := _find(cifar, cache):  # by another process, while this one waited
            return ready
        given = [layout for layout in cifar.layouts if data_dir and (data_dir / layout.archive.name).is_file()]
        layout = (given or cifar.layouts)[0]
        if data_dir and given:
            archive = data_dir / layout.archive.name
            verify(archive, layout.archive)
        else:
            (archive,) = obtain(
                cifar.name, [layout.archive], cache, data_dir=data_dir, download=download, progress=progress
            )
        unpack(archive, cache / layout.folder)
        if not given:
            archive.unlink()
        return layout, cache / layout.folder


def _read(folder: Path, names: tuple[str, ...], layout: Layout, records: int) -> Labelled:
    each = records // len(names)
    parts = [_read_file(folder / name, layout, each) for name in names]
    return Labelled(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))


def _read_file(path: Path, layout: Layout, records: int) -> Labelled:
    if not path.is_file():
        raise DataError(f"{path}: expected the files {', '.join(_files(layout))} in this folder, found no {path.name}")
    if layout.label_key is None:
        return _read_binary(path, layout.label_bytes, records)
    return _read_python(path, layout.label_key, records)


def _read_binary(path: Path, label_bytes: int, records: int) -> Labelled:
    """Records of label bytes, then the red, green and blue planes, row by row."""
    length = label_bytes + PIXELS
    content = np.fromfile(path, dtype=np.uint8)
    if len(content) != records * length:
        raise DataError(
            f"{path}: expected {records:,} records of {length:,} bytes, {records * length:,} in all, "
            f"found {len(content):,} bytes; the file is truncated or not in CIFAR's binary layout"
        )
    table = torch.from_numpy(content.reshape(records, length))
    pixels = table[:, label_bytes:].reshape(-1, 3, 32, 32)
    return Labelled(pixels, table[:, label_bytes - 1].long())


def _read_python(path: Path, label_key: str, records: int) -> Labelled:
    """A pickled dictionary with the pixels as (records, 3072) bytes under "data" and a list of labels."""
    content = read_pickle(path)
    pixels, labels = content.get("data"), content.get(label_key)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape != (records, PIXELS):
        raise DataError(f"{path}: expected 'data' as uint8 of shape ({records}, {PIXELS}), found {_form(pixels)}")
    if not isinstance(labels, list) or len(labels) != records or not all(type(label) is int for label in labels):
        raise DataError(f"{path}: expected {label_key!r} as a list of {records} whole numbers, found {_form(labels)}")
    return Labelled(torch.from_numpy(pixels.copy()).view(-1, 3, 32, 32), torch.tensor(labels))


def _form(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "nothing" if value is None else type(value).__name__
