"""Progress of a measurement, as a bar on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

from sparsesam.analysis import ProgressCallback


@contextmanager
def show_progress(title: str) -> Iterator[ProgressCallback]:
    """Yield a function that shows ``progress(done, total)`` and the remaining time, in a terminal only."""
    console = Console(stderr=True, highlight=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
