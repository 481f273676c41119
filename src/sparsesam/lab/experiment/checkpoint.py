"""Checkpoints: written whole or not at all, read without running anything that is in them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from sparsesam.lab.experiment.errors import CheckpointError

FORMAT = "sparsesam run"
VERSION = 1


def save(path: Path, content: dict[str, Any]) -> None:
    """Replace ``path`` at once: whoever dies, or whatever fails meanwhile, leaves the old file in place."""
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            torch.save({"format": FORMAT, "version": VERSION, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
        part.unlink(missing_ok=True)
        kept = "the one before it is intact" if path.exists() else "there is none before it"
        raise CheckpointError(
            f"{path} could not be written ({_reason(error)}); {kept}; "
            "make room, then give the command again with --resume"
        ) from error


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The content of a checkpoint of ours; anything else is refused."""
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not there: the run had not finished an epoch; start it anew") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is refused: it holds more than tensors and plain values, and loading it could run code. "
            "It was not written by sparsesam, or was changed since"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: it is damaged, or no checkpoint at all ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} must be a checkpoint of `sparsesam train`, but is another file; check the path")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} must be of version {VERSION}, got {content.get('version')}; "
            "go on with the sparsesam that wrote it, or start anew in another directory"
        )
    return content


def _reason(error: BaseException) -> BaseException:
    """What the system said, beneath what torch made of it."""
    beneath = error.__context__
    return beneath if isinstance(beneath, OSError) else error
