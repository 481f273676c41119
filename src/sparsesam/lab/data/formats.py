"""Reads and checks the files of CIFAR (binary records and pickles) and Fashion-MNIST (idx)."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sparsesam.lab.data.splits import DataError, Labelled

PIXELS = 3 * 32 * 32


def read_cifar_binary(paths: Sequence[Path], images: int, *, label_bytes: int) -> Labelled:
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


def read_cifar_python(paths: Sequence[Path], images: int, *, label_key: str) -> Labelled:
    """Read pickled dictionaries with the pixels as (records, 3072) bytes under "data" and a list of labels."""
    records = images // len(paths)
    pixels, labels = [], []
    for path in paths:
        content = read_pickle(path)
        pixels.append(_array(path, content, "data", np.uint8, (records, PIXELS)))
        labels.append(_array(path, content, label_key, np.integer, (records,)))
    planes, classes = (torch.from_numpy(np.concatenate(parts)) for parts in (pixels, labels))
    return Labelled(planes.view(-1, 3, 32, 32), classes.long())


def _array(path: Path, content: Mapping[str, Any], key: str, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    found = np.asarray(content.get(key))
    if not np.issubdtype(found.dtype, dtype) or found.shape != shape:
        described = f"{found.dtype} of shape {found.shape}" if key in content else "nothing"
        raise DataError(f"{path}: expected {key!r} as {dtype.__name__} of shape {shape}, found {described}")
    return found


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


def read_pickle(path: Path) -> dict[str, Any]:
    """Read a pickled dictionary of arrays and lists, as written by Python 2."""
    try:
        content = _Unpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()
    # A damaged stream can fail in any opcode, with any error.
    except Exception as error:
        raise DataError(
            f"{path}: expected a pickle of arrays, lists and dictionaries only, found one that cannot be read: "
            f"{error or type(error).__name__}"
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a pickled dictionary, found {type(content).__name__}")
    return content


class _Unpickler(pickle._Unpickler):
    """Allows only the construction of numpy arrays.

    In Python: the one in C reserves as much memory as a damaged file asks for.
    """

    _reconstruct = np.empty(0).__reduce__()[0]
    _allowed: ClassVar[dict[str, Any]] = {
        "numpy.ndarray": np.ndarray,
        "numpy.dtype": np.dtype,
        "numpy.core.multiarray._reconstruct": _reconstruct,
        "numpy._core.multiarray._reconstruct": _reconstruct,
    }

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self._allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed")
        return self._allowed[f"{module}.{name}"]
