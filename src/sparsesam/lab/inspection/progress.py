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
    """Yield a function that shows ``progress(done, total)``: a bar in a terminal, a line now and then in a log.

    The remaining time is estimated from the rate since the first call, so that loading a run does not count.
    """
    console = Console(stderr=True, highlight=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        start, last, begun = 0.0, 0.0, None

        def progress(done: int, total: int) -> None:
            nonlocal start, last, begun
            bar.update(task, completed=done, total=total)
            now = time.monotonic()
            if begun is None:
                start, last, begun = now, now, done
            if not console.is_terminal and now - last >= EVERY and begun < done < total:
                last, left = now, (now - start) * (total - done) / (done - begun)
                text = f"{title}: {100 * done / total:.0f} %, about {duration(left)} remaining"
                console.print(text, soft_wrap=True, markup=False)

        yield progress
