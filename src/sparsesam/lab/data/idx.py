"""The idx format of MNIST and its relatives: a magic number, the dimensions, bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparsesam.lab.data.errors import DataError

UNSIGNED_BYTE = 0x08


def read_idx(path: Path, dimensions: int) -> Tensor:
    """A uint8 tensor with that many dimensions. Files that end in .gz are decompressed.

    Layout, big-endian: 0x0000, the type of an entry (0x08, unsigned byte), the number of dimensions; each
    dimension as 4 bytes; the entries.
    """
    content = _read(path)
    start = 4 + 4 * dimensions
    magic = (UNSIGNED_BYTE << 8) | dimensions
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
