"""A sweep's table, live while it runs and complete at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from sparsesam.lab.experiment.summary import Row, summarize
from sparsesam.lab.experiment.sweep import Job


@contextmanager
def live(draw: Callable[[], Table], console: Console) -> Iterator[None]:
    """Draw the table anew once a second; on no terminal, at the end only."""
    if not console.is_terminal:
        yield
        console.print(draw())
        return
    with Live(get_renderable=draw, console=console, refresh_per_second=1):
        yield


def table(title: str, jobs: Sequence[Job]) -> Table:
    """Where the runs in these directories are now."""
    rows = summarize(jobs)
    drawn = Table(title=title)
    drawn.add_column("")
    for heading in ("test accuracy", f"time / {rows[0].label}", "sparsity", "seeds"):
        drawn.add_column(heading, justify="right")
    going_on = any(row.now for row in rows)
    if going_on:
        drawn.add_column("now")
    for row in rows:
        cells = [
            row.label,
            mean_and_spread(row.accuracy, row.spread),
            "–" if row.relative_time is None else f"{row.relative_time:.2f}",
            "–" if row.sparsity is None else f"{row.sparsity:.4f}",
            _seeds(row),
        ]
        drawn.add_row(*cells, *([row.now] if going_on else []))
    return drawn


def mean_and_spread(mean: float | None, spread: float | None) -> str:
    """Shares as percentages."""
    if mean is None:
        return "–"
    return f"{100 * mean:.2f}{'' if spread is None else f' ± {100 * spread:.2f}'} %"


def _seeds(row: Row) -> str:
    done = str(row.seeds) if row.finished == row.seeds else f"{row.finished} of {row.seeds}"
    return f"{done}, {row.failed} failed" if row.failed else done
