"""Progress of a measurement on stderr, with an estimate of the remaining time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

from sparsesam.analysis import ProgressCallback
from sparsesam.lab.experiment.observers import duration

#: In a log, a line is printed after so many seconds.
EVERY = 10.0


@contextmanager
def show_progress(title: str) -> Iterator[ProgressCallback]:
    """Yield a function that shows ``progress(done, total)``: a bar in a terminal, a line now and then in a log."""
    console = Console(stderr=True, highlight=False)
    start = last = time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)

        def progress(done: int, total: int) -> None:
            nonlocal last
            bar.update(task, completed=done, total=total)
            now = time.monotonic()
            if not console.is_terminal and now - last >= EVERY and done < total:
                last, left = now, (now - start) * (total - done) / done
                text = f"{title}: {100 * done / total:.0f} %, about {duration(left)} remaining"
                console.print(text, soft_wrap=True, markup=False)

        yield progress
