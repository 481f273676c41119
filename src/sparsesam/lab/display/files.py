"""Checks a file to write before anything is computed for it."""

from __future__ import annotations

import os
from pathlib import Path


def make_parent(name: str, file: Path) -> None:
    """Make the directory of ``file``, the value of the argument ``name``; ValueError if it cannot be written."""
    if file.is_dir():
        raise ValueError(f"{name} must be a file, got the directory {str(file)!r}; add a file name")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(file.parent, os.W_OK) else "permission denied"
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
    if reason:
        raise ValueError(f"{name} {str(file)!r} cannot be written ({reason}); choose a directory you can write to")
