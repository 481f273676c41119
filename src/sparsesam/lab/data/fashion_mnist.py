"""Fashion-MNIST (Xiao et al. 2017): 60,000 and 10,000 pieces of clothing, 28x28, grey, in idx files."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparsesam.lab.data.download import Remote, cache_dir, obtain
from sparsesam.lab.data.splits import DataError, Labelled, Splits

NAME = "fashion-mnist"
CLASSES = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
FOLDERS = ("", "fashion-mnist", "fashion", "FashionMNIST/raw")
HOST = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"

#: Images and labels, for training and for testing.
REMOTES = (
    Remote(f"{HOST}/train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    Remote(f"{HOST}/train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
    Remote(f"{HOST}/t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
    Remote(f"{HOST}/t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
)


def load_fashion_mnist(
    data_dir: Path | None = None,
    download: bool = True,
    progress: bool = False,
    remotes: Sequence[Remote] = REMOTES,
) -> Splits:
    """From idx or idx.gz files in ``data_dir`` or its usual subfolders, else from the cache, else from the net."""
    paths = _local(data_dir, remotes) if data_dir else None
    if paths is None:
        paths = obtain(NAME, remotes, cache_dir() / NAME, data_dir=data_dir, download=download, progress=progress)
    return Splits(
        train=_labelled(*paths[:2]),
        test=_labelled(*paths[2:]),
        name=NAME,
        classes=CLASSES,
        mean=(0.2860,),
        std=(0.3530,),
    )


def _local(data_dir: Path, remotes: Sequence[Remote]) -> list[Path] | None:
    """The four files, from the first folder that has any of them; None where there is none."""
    names = [remote.name.removesuffix(".gz") for remote in remotes]
    for folder in (data_dir / name for name in FOLDERS):
        either = [(folder / name, folder / f"{name}.gz") for name in names]
        found = [next((path for path in paths if path.exists()), None) for paths in either]
        if absent := [name for name, path in zip(names, found, strict=True) if path is None]:
            if len(absent) < len(found):
                raise DataError(
                    f"{folder}: expected {', '.join(names)}, each as it is or with .gz, found no {', '.join(absent)}"
                )
            continue
        return [path for path in found if path is not None]
    return None


def _labelled(images: Path, labels: Path) -> Labelled:
    pixels, numbers = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(numbers):
        raise DataError(f"{labels}: expected {len(pixels):,} labels, one per image of {images}, found {len(numbers):,}")
    return Labelled(pixels[:, None], numbers.long())


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The uint8 tensor, with that many dimensions, in a file of the idx format. Files that end in .gz are decompressed.

    Layout, big-endian: 0x0000, the type of an entry (0x08, unsigned byte), the number of dimensions; each
    dimension as 4 bytes; the entries.
    """
    content = _read(path)
    start = 4 + 4 * dimensions
    magic = 0x0800 | dimensions
    found = int.from_bytes(content[:4], "big")
    if len(content) < start or found != magic:
        raise DataError(
            f"{path}: expected an idx file of bytes in {dimensions} dimensions (magic number {magic}), "
            f"found magic number {found} in {len(content):,} bytes"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) != start + math.prod(shape):
        raise DataError(
            f"{path}: expected {start + math.prod(shape):,} bytes for {' x '.join(map(str, shape))} entries, "
            f"found {len(content):,}; the file is truncated or has more than one array in it"
        )
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=start).copy()).view(shape)


def _read(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: expected a complete gzip file, found a damaged one ({error})") from error
