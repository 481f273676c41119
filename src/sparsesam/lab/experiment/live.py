"""The progress bar of one run in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.experiment.observers import EpochLines, RunObserver, epoch_line, headline, total_steps
from sparsesam.lab.experiment.training import Training


class Live(RunObserver):
    """Epoch, loss, accuracy, images per second, mask density, rho and time remaining; a line stays for each epoch."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[latest]}"),
            TimeRemainingColumn(),
            TextColumn("remaining"),
        )
        self.bar = Progress(*columns, console=self.console, refresh_per_second=4)
        self.task = self.bar.add_task("", total=None, latest="")

    def begin(self, config: TrainConfig, training: Training, where: str) -> None:
        self.console.print(headline(config, training, where))
        self.epochs = config.epochs
        self.bar.reset(self.task, total=total_steps(config, training), completed=training.steps_taken)
        self.bar.start()

    def step(self, training: Training) -> None:
        sums = training.sums
        latest = f"{sums.images / max(sums.seconds, 1e-9):,.0f} images/s"
        if sums.images:
            latest = f"loss {sums.loss / sums.images:.3f}  train {sums.correct / sums.images:.1%}  {latest}"
        if training.sparsity is not None:
            latest += f"  density {1 - training.sparsity:.3f}  rho {training.rho:.3g}"
        self.bar.update(
            self.task,
            completed=training.steps_taken,
            description=f"epoch {min(training.position.epoch + 1, self.epochs)}/{self.epochs}",
            latest=latest,
        )

    def epoch(self, record: Mapping[str, Any]) -> None:
        self.console.print(epoch_line(record))

    def end(self) -> None:
        self.bar.stop()


def for_terminal(*, quiet: bool) -> RunObserver:
    """A progress bar on a terminal, a line per epoch elsewhere."""
    if quiet:
        return RunObserver()
    return Live() if sys.stdout.isatty() else EpochLines()
