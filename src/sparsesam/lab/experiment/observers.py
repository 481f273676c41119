"""Observers of a run: a progress bar in a terminal, lines in a log, and curves in Lightning's loggers."""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from sparsesam.integrations.extras import required_by
from sparsesam.lab.display import plural
from sparsesam.lab.experiment.result import EpochRecord

if TYPE_CHECKING:
    from sparsesam.lab.experiment.training import Training


class RunObserver:
    """Callbacks: when a run starts or resumes in ``where``, after each step and evaluated epoch, and last of all."""

    def begin(self, training: Training, where: Path) -> None: ...
    def step(self, training: Training) -> None: ...
    def epoch(self, record: EpochRecord) -> None: ...
    def end(self, *, complete: bool) -> None: ...


class ProgressBar(RunObserver):
    """Prints a line per epoch; in a terminal, shows epoch, remaining time, loss and accuracy after every step too."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, markup=False)
        self.bar = Progress(console=self.console, refresh_per_second=4, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=None)

    def begin(self, training: Training, where: Path) -> None:
        config = training.config
        begun = f", resumed after {plural(training.steps_taken, 'step')}" if training.steps_taken else ""
        self.console.print(
            f"{config.optimizer} on {config.dataset} with {config.model} ({training.num_parameters:,} parameters), "
            f"{plural(config.epochs, 'epoch')} of {plural(training.batches.steps, 'step')}{begun}; {where}",
            soft_wrap=True,
        )
        self.bar.reset(self.task, total=training.total_steps, completed=training.steps_taken)
        self.bar.start()

    def step(self, training: Training) -> None:
        sums, epochs = training.sums, training.config.epochs
        epoch = min(training.steps_taken // training.batches.steps + 1, epochs)
        text = f"epoch {epoch}/{epochs}  loss {sums.loss / sums.images:.3f}  train {sums.correct / sums.images:.1%}"
        self.bar.update(self.task, completed=training.steps_taken, description=text)

    def epoch(self, record: EpochRecord) -> None:
        remaining = self.bar.tasks[0].time_remaining
        validation = "" if record.val_accuracy is None else f"val {record.val_accuracy:6.2%}  "
        mask = "" if record.sparsity is None else f"  density {1 - record.sparsity:.3f}  rho {record.rho:.3g}"
        left = f"  {duration(remaining)} remaining" if remaining else ""
        self.console.print(
            f"epoch {record.epoch}/{record.epochs}  loss {record.train_loss:.4f}  "
            f"train {record.train_accuracy:6.2%}  {validation}test {record.test_accuracy:6.2%}  "
            f"{record.images_per_second:,.0f} images/s{mask}{left}",
            soft_wrap=True,
        )

    def end(self, *, complete: bool) -> None:
        self.bar.stop()


def duration(seconds: float) -> str:
    """Format a duration: 45 s, 12 min, 3 h 20 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


class Curves(RunObserver):
    """Logs curves to TensorBoard, Weights & Biases or MLflow; ImportError at construction if it is not installed."""

    def __init__(self, kind: str, name: str | None) -> None:
        self.kind, self.name = kind, name
        package, installed = "pytorch_lightning", f"pytorch-lightning {kind}"
        if kind == "tensorboard":
            package, installed = "lightning_fabric", kind
        with required_by(f"--logger {kind}", f"{installed}; or --logger none"):
            importlib.import_module(kind)
            self.loggers = importlib.import_module(f"{package}.loggers")

    def begin(self, training: Training, where: Path) -> None:
        name = self.name or where.name
        if self.kind == "tensorboard":
            self.logger = self.loggers.TensorBoardLogger(root_dir=where, name="tensorboard", version="")
        elif self.kind == "wandb":
            offline = os.environ.get("WANDB_MODE", "offline") == "offline"
            self.logger = self.loggers.WandbLogger(name=name, save_dir=where, project="sparsesam", offline=offline)
        else:
            tracking = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(where / 'mlflow.db').resolve()}"
            self.logger = self.loggers.MLFlowLogger("sparsesam", run_name=name, tracking_uri=tracking)
        self.logger.log_hyperparams(asdict(training.config))

    def epoch(self, record: EpochRecord) -> None:
        curves = {name: value for name, value in asdict(record).items() if isinstance(value, float)}
        grouped = {re.sub("^(train|val|test)_", r"\1/", name): value for name, value in curves.items()}
        self.logger.log_metrics(grouped, step=record.epoch)

    def end(self, *, complete: bool) -> None:
        self.logger.finalize("success" if complete else "failed")
