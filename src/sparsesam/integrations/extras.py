"""Packages that an integration needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Around imports of other packages: what is missing is said together with the extra that brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{error.name} is not installed; pip install "sparsesam[{extra}]" installs it', name=error.name
        ) from error
