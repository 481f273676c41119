"""Small data sets in the official layouts, for the tests to write, damage and read."""

import gzip
import hashlib
import struct
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sparsesam.lab.data.download import Remote
from sparsesam.lab.data.published import Published

RECORDS = 20


def small(cifar: Published) -> Published:
    """The same data set with ``RECORDS`` images per file, and as many classes as that allows."""
    return replace(cifar, train_size=len(cifar.train) * RECORDS, test_size=RECORDS, classes=cifar.classes[:10])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def pixels(records: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (records, 3072), dtype=np.uint8)


def labels(records: int) -> np.ndarray:
    return np.arange(records, dtype=np.uint8) % 10


def write_cifar(root: Path, cifar: Published) -> Path:
    """Write the files below ``root``; the seeds of the pixels are 0, 1, … by file."""
    folder = root / cifar.folders[0]
    folder.mkdir(parents=True)
    for seed, name in enumerate(cifar.train + cifar.test):
        coarse = [np.full((RECORDS, 1), 99, np.uint8)] if cifar.name == "cifar100" else []
        columns = [*coarse, labels(RECORDS)[:, None], pixels(RECORDS, seed)]
        (folder / name).write_bytes(np.concatenate(columns, axis=1).tobytes())
    return folder


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def fashion_files(*, compressed: bool) -> dict[str, bytes]:
    """The four idx files by name, of 20 training and 10 test images."""
    draw, content = np.random.default_rng(0), {}
    for prefix, count in (("train", 20), ("t10k", 10)):
        content[f"{prefix}-images-idx3-ubyte"] = idx(draw.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        content[f"{prefix}-labels-idx1-ubyte"] = idx(labels(count))
    if compressed:
        return {f"{name}.gz": gzip.compress(file, mtime=0) for name, file in content.items()}
    return content


def tar(folder: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, arcname=folder.name)
    return archive


def remote(url: str, content: bytes) -> Remote:
    return Remote(url, hashlib.md5(content).hexdigest())
