"""The demo's progress bar and table; the only place that draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sparsesam.experiment.demo import OPTIMIZERS, DemoConfig, DemoResult
from sparsesam.experiment.demo_summary import DemoRow


class OnEpoch(Protocol):
    """Called with the result so far of the run that has just finished an epoch."""

    def __call__(self, result: DemoResult) -> None: ...


@contextmanager
def progress(config: DemoConfig, console: Console) -> Iterator[OnEpoch]:
    """A live bar over all epochs of all runs, with the latest loss and accuracy and the time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[latest]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=config.seeds * config.epochs * len(OPTIMIZERS), latest="")

        def on_epoch(result: DemoResult) -> None:
            latest = f"{result.optimizer:6} loss {result.losses[-1]:.3f} test {result.test_accuracy:6.1%}"
            bar.update(task, advance=1, latest=latest, description=f"seed {result.seed}")

        yield on_epoch


def table(rows: Sequence[DemoRow], config: DemoConfig) -> Table:
    """The final table, one line per optimizer."""
    drawn = Table(
        title=f"digits, {config.flip:.0%} of the training labels wrong, {config.seeds} seed(s), "
        f"{config.epochs} epochs, rho {config.rho}"
    )
    drawn.add_column("optimizer")
    for heading in ("test accuracy", "time / SGD", "sparsity"):
        drawn.add_column(heading, justify="right")
    for row in rows:
        spread = "" if row.spread is None else f" ± {100 * row.spread:.1f}"
        drawn.add_row(
            row.optimizer,
            f"{100 * row.accuracy:.1f}{spread} %",
            f"{row.relative_time:.2f}",
            "–" if row.sparsity is None else f"{row.sparsity:.4f}",
        )
    return drawn
