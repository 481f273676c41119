"""Checkpoints: replaced atomically, checked when they are read, and loaded without executing code from the file.

torch.save writes a zip archive with a CRC-32 of every record; torch.load does not check it, `load` does.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from sparsesam.lab.experiment.errors import CheckpointError

FORMAT = "sparsesam run"
VERSION = 2

_REMEDY = (
    "delete it and run the command again with --resume to train from the beginning, or begin a new run from the "
    "weights of another file with --init-from"
)
_REMEDY_OF_BEST = "use last.pt, the weights of the last epoch, instead"


def save(path: Path, content: dict[str, Any]) -> None:
    """Replace ``path`` atomically: if writing fails or the process dies, the old file stays."""
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            torch.save({"format": FORMAT, "version": VERSION, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
        part.unlink(missing_ok=True)
        kept = "the previous checkpoint is intact" if path.exists() else "there is no previous checkpoint"
        reason = error.__context__ if isinstance(error.__context__, OSError) else error
        raise CheckpointError(
            f"{path} could not be written ({reason}); {kept}; free some space, then run the command again with --resume"
        ) from error


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The content of a checkpoint of ours; damaged files and others are refused."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: the run stopped before its first checkpoint; start it again")
    try:
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"the checksum of {damaged} does not match")
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        remedy = _REMEDY_OF_BEST if path.name == "best.pt" else _REMEDY
        raise CheckpointError(f"{path} is damaged or truncated ({error}); {remedy}") from error
    content = load_tensors(path, device)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} must be a checkpoint of `sparsesam train`, but is another file; check the path")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} must be of version {VERSION}, got {content.get('version')}; "
            "continue with the version of sparsesam that wrote it, or start again in another directory"
        )
    return content


def load_tensors(path: Path, device: torch.device | str = "cpu") -> Any:
    """The content of any file of torch.save; nothing that is in the file is run."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is refused: it contains more than tensors and plain values, and loading it could run code; "
            "save the state_dict only: torch.save(model.state_dict(), PATH)"
        ) from error
    except (RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: it is damaged or not written by torch.save ({error})") from error
