"""Progress of a run: a bar in a terminal, lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from sparsesam.lab.display.numbers import plural
from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.experiment.training import Training


class RunObserver:
    """Follows a run; this one shows nothing."""

    def begin(self, config: TrainConfig, training: Training, where: str) -> None:
        """Training starts, or is resumed, in the directory ``where``."""

    def step(self, training: Training) -> None:
        """A step was taken."""

    def epoch(self, record: Mapping[str, Any]) -> None:
        """An epoch is complete and evaluated."""

    def end(self) -> None:
        """The last call, whether or not the run is complete."""


class EpochLines(RunObserver):
    """A line per epoch with the time remaining, for logs."""

    def begin(self, config: TrainConfig, training: Training, where: str) -> None:
        print(headline(config, training, where), flush=True)
        self._start, self._first, self._total = time.monotonic(), training.steps_taken, total_steps(config, training)

    def epoch(self, record: Mapping[str, Any]) -> None:
        taken, left = record["step"] - self._first, self._total - record["step"]
        remaining = (time.monotonic() - self._start) * left / taken
        print(f"{epoch_line(record)}{f'  {duration(remaining)} remaining' if left else ''}", flush=True)


class ProgressBar(RunObserver):
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
    return ProgressBar() if sys.stdout.isatty() else EpochLines()


def total_steps(config: TrainConfig, training: Training) -> int:
    whole = config.epochs * training.batches.steps
    return min(whole, config.max_steps or whole)


def headline(config: TrainConfig, training: Training, where: str) -> str:
    begun = f", resumed after {plural(training.steps_taken, 'step')}" if training.steps_taken else ""
    return (
        f"{config.optimizer} on {config.dataset} with {config.model} ({training.num_parameters:,} parameters), "
        f"{plural(config.epochs, 'epoch')} of {plural(training.batches.steps, 'step')}{begun}; {where}"
    )


def epoch_line(record: Mapping[str, Any]) -> str:
    perturbed = "" if record["sparsity"] is None else f"  density {1 - record['sparsity']:.3f}  rho {record['rho']:.3g}"
    validation = "" if record["val_accuracy"] is None else f"val {record['val_accuracy']:6.2%}  "
    return (
        f"epoch {record['epoch']}/{record['epochs']}  loss {record['train_loss']:.4f}  "
        f"train {record['train_accuracy']:6.2%}  {validation}test {record['test_accuracy']:6.2%}  "
        f"{record['images_per_second']:,.0f} images/s{perturbed}"
    )


def duration(seconds: float) -> str:
    """45 s, 12 min, 3 h 20 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
