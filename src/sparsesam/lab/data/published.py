"""CIFAR-10, CIFAR-100 (Krizhevsky 2009) and Fashion-MNIST (Xiao et al. 2017) from their published files."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from sparsesam.lab.data.download import Remote, cache_dir, fetch, unpack
from sparsesam.lab.data.splits import DataError, DatasetInfo, Labelled, Splits


@dataclass(frozen=True)
class Published(DatasetInfo):
    """``remotes`` are the published files themselves, or an archive of the first folder.

    ``folders`` are the subfolders that may contain the files. ``read`` returns Labelled from one split's files and its
    number of images.
    """

    remotes: tuple[Remote, ...]
    folders: tuple[str, ...]
    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Callable[[Sequence[Path], int], Labelled]
    train_size: int = 50_000
    test_size: int = 10_000

    def missing(self, folder: Path) -> list[str]:
        """Returns the files missing in the folder, plain and compressed."""
        names = (*self.train, *self.test)
        return [name for name in names if not any((folder / f"{name}{end}").is_file() for end in ("", ".gz"))]


def load_published(
    source: Published, data_dir: Path | None = None, download: bool = True, progress: bool = False
) -> Splits:
    """Load from ``data_dir`` or its usual subfolders, else from the cache, filled from an archive or a download."""
    names = (*source.train, *source.test)
    places = [data_dir / name for name in source.folders] if data_dir else []
    begun = [place for place in places if len(source.missing(place)) < len(names)]
    folder = begun[0] if begun else _cached(source, data_dir, download, progress)
    if missing := source.missing(folder):
        raise DataError(f"{folder}: expected the files {', '.join(names)}, found no {', '.join(missing)}")
    return Splits(
        source.read([folder / name for name in source.train], source.train_size),
        source.read([folder / name for name in source.test], source.test_size),
        **{field.name: getattr(source, field.name) for field in fields(DatasetInfo)},
    )


def _cached(source: Published, data_dir: Path | None, download: bool, progress: bool) -> Path:
    """Returns the folder in the cache, filled from the user's archive if there is one, otherwise by a download."""
    cache = cache_dir() / source.name
    folder = cache / source.folders[0]
    if not source.missing(folder):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "lock"):
        if not source.missing(folder):  # another process was faster
            return folder
        given = data_dir if data_dir and (data_dir / source.remotes[0].name).is_file() else None
        may = download and not given
        files = fetch(source.remotes, given or cache, download=may, progress=progress, data_dir=data_dir)
        for archive in (file for file in files if ".tar" in file.suffixes):
            unpack(archive, folder)
            if not given:
                archive.unlink()
    return folder


def read_cifar(paths: Sequence[Path], images: int, *, label_bytes: int) -> Labelled:
    """Read records of label bytes, the last of which is the label, then red, green and blue planes, row by row."""
    records, length = images // len(paths), label_bytes + 3 * 32 * 32
    contents = [np.fromfile(path, dtype=np.uint8) for path in paths]
    for path, content in zip(paths, contents, strict=True):
        if len(content) != records * length:
            raise DataError(
                f"{path}: expected {records:,} records of {length:,} bytes, found {len(content):,} bytes; "
                "the file is truncated or not in CIFAR's binary layout"
            )
    table = torch.from_numpy(np.concatenate(contents)).view(images, length)
    return Labelled(table[:, label_bytes:].reshape(-1, 3, 32, 32), table[:, label_bytes - 1].long())


def read_fashion_mnist(paths: Sequence[Path], images: int) -> Labelled:
    """Read an idx file of (images, 28, 28) pixels and one of labels; the files contain the number of images."""
    pixels, labels = paths
    return Labelled(read_idx(pixels, 3)[:, None], read_idx(labels, 1).long())


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read a uint8 tensor with the given number of dimensions from an idx file, plain or compressed (NAME.gz).

    Layout, big-endian: 0x0000, the type of an entry (0x08, unsigned byte), the number of dimensions; each
    dimension as 4 bytes; the entries.
    """
    path = path if path.is_file() else path.with_name(f"{path.name}.gz")
    header = struct.Struct(f">{1 + dimensions}I")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        magic, *shape = header.unpack_from(content)
        if magic != 0x0800 | dimensions or len(content) != header.size + math.prod(shape):
            raise ValueError(f"{len(content):,} bytes, of which the first four are {magic:#010x}")
    except (EOFError, OSError, ValueError, struct.error, zlib.error) as error:
        raise DataError(f"{path}: expected an idx file of bytes in {dimensions} dimensions, found {error}") from error
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header.size).view(shape)


_TORONTO = "https://www.cs.toronto.edu/~kriz"  # the binary versions, those without pickles

CIFAR10 = Published(
    name="cifar10",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    remotes=(Remote(f"{_TORONTO}/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
    folders=("cifar-10-batches-bin", ""),
    train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    test=("test_batch.bin",),
    read=partial(read_cifar, label_bytes=1),
)

_FINE_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""

CIFAR100 = Published(
    name="cifar100",
    classes=tuple(_FINE_CLASSES.split()),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    remotes=(Remote(f"{_TORONTO}/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
    folders=("cifar-100-binary", ""),
    train=("train.bin",),
    test=("test.bin",),
    read=partial(read_cifar, label_bytes=2),
)

_ZALANDO = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"

FASHION_MNIST = Published(
    name="fashion-mnist",
    classes=("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    mean=(0.2860,),
    std=(0.3530,),
    train_size=60_000,
    remotes=(
        Remote(f"{_ZALANDO}/train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        Remote(f"{_ZALANDO}/train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
        Remote(f"{_ZALANDO}/t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
        Remote(f"{_ZALANDO}/t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    folders=("", "fashion-mnist", "fashion", "FashionMNIST/raw"),
    train=("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    test=("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
    read=read_fashion_mnist,
)
