"""Reads and checks the files of CIFAR (binary records) and Fashion-MNIST (idx)."""

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

from sparsesam.lab.data.splits import DataError, Labelled

PIXELS = 3 * 32 * 32


def read_cifar(paths: Sequence[Path], images: int, *, label_bytes: int) -> Labelled:
    """Read records of label bytes, the last of which is the label, then red, green and blue planes, row by row."""
    records, length = images // len(paths), label_bytes + PIXELS
    contents = [np.fromfile(path, dtype=np.uint8) for path in paths]
    for path, content in zip(paths, contents, strict=True):
        if len(content) != records * length:
            raise DataError(
                f"{path}: expected {records:,} records of {length:,} bytes, {records * length:,} in all, "
                f"found {len(content):,} bytes; the file is truncated or not in CIFAR's binary layout"
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
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: expected a complete gzip file, found a damaged one ({error})") from error
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
