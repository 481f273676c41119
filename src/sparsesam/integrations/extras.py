"""Imports of optional packages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def required_by(purpose: str, packages: str) -> Iterator[None]:
    """Make a failed import in the block say what needs the package and how to install it."""
    try:
        yield
    except ImportError as error:
        raise type(error)(f"{purpose} needs {error.name}: pip install {packages}", name=error.name) from error
