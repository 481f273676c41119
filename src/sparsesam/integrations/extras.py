"""Packages that are installed by extras."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def required_by(purpose: str, packages: str) -> Iterator[None]:
    """For imports of optional packages in the block: the error says what needs them and how to install them."""
    try:
        yield
    except ImportError as error:
        raise type(error)(f"{purpose} needs {error.name}: pip install {packages}", name=error.name) from error
