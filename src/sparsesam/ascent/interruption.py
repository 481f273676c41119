"""Ctrl-C in the middle of bringing things back."""

from __future__ import annotations

from collections.abc import Callable


def finish(undo: Callable[[], None]) -> None:
    """Call what can be called again after it was interrupted; the interruption is raised when all is done."""
    try:
        undo()
    except BaseException:
        undo()
        raise
