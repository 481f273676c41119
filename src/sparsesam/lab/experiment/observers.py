"""Progress of a run: a bar in a terminal, lines in a log."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from sparsesam.lab.display import plural
from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.experiment.result import EpochRecord
from sparsesam.lab.experiment.training import Training


class RunObserver:
    """Follows a run; this one shows nothing."""

    def begin(self, config: TrainConfig, training: Training, where: str) -> None:
        """Training starts, or is resumed, in the directory ``where``."""

    def step(self, training: Training) -> None:
        """A step was taken."""

    def epoch(self, record: EpochRecord) -> None:
        """An epoch is complete and evaluated."""

    def end(self) -> None:
        """The last call, whether or not the run is complete."""


class ProgressBar(RunObserver):
    """Epoch, loss, accuracy, images per second, mask density, rho and time remaining; a line stays for each epoch.

    Where the output is no terminal, such as a log, there are only the lines, with the time remaining.
    """

    def __init__(self) -> None:
        self.console = Console(highlight=False, markup=False)
        columns = (
            TextColumn("{task.description}"),
            TimeRemainingColumn(table_column=Column(min_width=7)),  # a narrow terminal cuts what comes last
            TextColumn("remaining", table_column=Column(min_width=9)),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[latest]}"),
        )
        is_log = not self.console.is_terminal
        self.bar = Progress(*columns, console=self.console, refresh_per_second=4, disable=is_log)
        self.task = self.bar.add_task("", total=None, latest="")

    def begin(self, config: TrainConfig, training: Training, where: str) -> None:
        self.console.print(headline(config, training, where), soft_wrap=True)
        self.epochs, self.start, self.first = config.epochs, time.monotonic(), training.steps_taken
        self.bar.reset(self.task, total=training.total_steps, completed=training.steps_taken)
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
            description=f"epoch {min(training.steps_taken // training.batches.steps + 1, self.epochs)}/{self.epochs}",
            latest=latest,
        )

    def epoch(self, record: EpochRecord) -> None:
        left = int(self.bar.tasks[0].remaining or 0)
        seconds = (time.monotonic() - self.start) * left / (record.step - self.first)
        remaining = f"  {duration(seconds)} remaining" if left and self.bar.disable else ""
        self.console.print(f"{epoch_line(record)}{remaining}", soft_wrap=True)

    def end(self) -> None:
        self.bar.stop()


def headline(config: TrainConfig, training: Training, where: str) -> str:
    begun = f", resumed after {plural(training.steps_taken, 'step')}" if training.steps_taken else ""
    return (
        f"{config.optimizer} on {config.dataset} with {config.model} ({training.num_parameters:,} parameters), "
        f"{plural(config.epochs, 'epoch')} of {plural(training.batches.steps, 'step')}{begun}; {where}"
    )


def epoch_line(record: EpochRecord) -> str:
    perturbed = "" if record.sparsity is None else f"  density {1 - record.sparsity:.3f}  rho {record.rho:.3g}"
    validation = "" if record.val_accuracy is None else f"val {record.val_accuracy:6.2%}  "
    return (
        f"epoch {record.epoch}/{record.epochs}  loss {record.train_loss:.4f}  "
        f"train {record.train_accuracy:6.2%}  {validation}test {record.test_accuracy:6.2%}  "
        f"{record.images_per_second:,.0f} images/s{perturbed}"
    )


def duration(seconds: float) -> str:
    """45 s, 12 min, 3 h 20 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
