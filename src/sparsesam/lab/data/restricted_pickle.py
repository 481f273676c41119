"""Pickles of numpy arrays, lists and dictionaries, read without executing anything else in them."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from sparsesam.lab.data.splits import DataError


def _latin1(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into pickles that Python 2 can read; other codecs could do harm."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"the codec {encoding!r} is not allowed")
    return text.encode("latin1")


_RECONSTRUCT = np.empty(0).__reduce__()[0]
ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("_codecs", "encode"): _latin1,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed") from None


def read_pickle(path: Path) -> dict[str, Any]:
    """The pickled dictionary, its keys as text. Only arrays, bytes, text, numbers, lists and dictionaries are made."""
    try:
        content = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    # A damaged stream can fail in any opcode, with whatever error that raises.
    except Exception as error:
        raise DataError(
            f"{path}: expected a pickle of nothing but arrays, lists and dictionaries, found one that cannot be read: "
            f"{error or type(error).__name__}"
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a pickled dictionary, found {type(content).__name__}")
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in content.items()}
