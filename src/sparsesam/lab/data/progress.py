"""A download's progress, drawn in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sparsesam.lab.data.download import Progress


@contextmanager
def download_bar() -> Iterator[Progress]:
    """Gives a callback for `load` that draws one bar per file.

    Use: ``with download_bar() as bar: load(name, progress=bar)``. Nothing is drawn before the first byte arrives,
    so a data set that is already here draws nothing.
    """
    try:
        from rich import progress as rich
    except ImportError as error:
        raise ImportError("the progress bar needs rich: pip install 'sparsesam[data]'") from error
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    tasks: dict[str, rich.TaskID] = {}
    with rich.Progress(*columns) as bars:

        def show(name: str, done: int, total: int | None) -> None:
            task = tasks.get(name)
            if task is None:
                task = tasks[name] = bars.add_task(name, total=total)
            bars.update(task, completed=done, total=total)

        yield show
