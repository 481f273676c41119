"""Small data sets in the official layouts, for the tests to write, damage and read."""

import gzip
import hashlib
import pickle
import struct
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sparsesam.lab.data.download import Remote
from sparsesam.lab.data.published import Published

RECORDS = 20


#: How the layouts of each data set store a label: bytes before the pixels, and a key of the pickle.
LABELS = {"cifar10": (1, "labels"), "cifar100": (2, "fine_labels")}


def small(cifar: Published, records: int = RECORDS) -> Published:
    """The same data set with this many images per file, and as many classes as that allows."""
    files = len(cifar.layouts[0].train)
    return replace(cifar, train_size=files * records, test_size=records, classes=cifar.classes[:10])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def pixels(records: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (records, 3072), dtype=np.uint8)


def labels(records: int) -> np.ndarray:
    return np.arange(records, dtype=np.uint8) % 10


def write_cifar(root: Path, cifar: Published, layout: int, records: int = RECORDS) -> Path:
    """Write layout 0 (binary) or 1 (python) below ``root``; the seeds of the pixels are 0, 1, … by file."""
    chosen, (label_bytes, label_key) = cifar.layouts[layout], LABELS[cifar.name]
    folder = root / chosen.folders[0]
    folder.mkdir(parents=True)
    for seed, name in enumerate(chosen.train + chosen.test):
        if layout == 1:
            content = {"data": pixels(records, seed), label_key: labels(records).tolist()}
            (folder / name).write_bytes(pickle.dumps(content, protocol=4))
        else:
            coarse = [np.full((records, 1), 99, np.uint8)] * (label_bytes - 1)
            columns = [*coarse, labels(records)[:, None], pixels(records, seed)]
            (folder / name).write_bytes(np.concatenate(columns, axis=1).tobytes())
    return folder


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def fashion_files(train: int = 20, test: int = 10) -> dict[str, bytes]:
    """The four idx files by name."""
    draw = np.random.default_rng(0)
    content = {}
    for prefix, count in (("train", train), ("t10k", test)):
        content[f"{prefix}-images-idx3-ubyte"] = idx(draw.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        content[f"{prefix}-labels-idx1-ubyte"] = idx(labels(count))
    return content


def write_fashion(folder: Path, *, compressed: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in fashion_files().items():
        path = folder / (f"{name}.gz" if compressed else name)
        path.write_bytes(gzip.compress(content, mtime=0) if compressed else content)


def tar(folder: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, arcname=folder.name)
    return archive


def remote(url: str, content: bytes) -> Remote:
    return Remote(url, hashlib.md5(content).hexdigest())
