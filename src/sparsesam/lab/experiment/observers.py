"""Progress of a run as lines, for logs; `sparsesam.lab.experiment.live` has the bar for terminals."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

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


def total_steps(config: TrainConfig, training: Training) -> int:
    whole = config.epochs * training.batches.steps
    return min(whole, config.max_steps or whole)


def headline(config: TrainConfig, training: Training, where: str) -> str:
    count = sum(parameter.numel() for parameter in training.module.parameters())
    begun = f", resumed after {plural(training.steps_taken, 'step')}" if training.steps_taken else ""
    return (
        f"{config.optimizer} on {config.dataset} with {config.model} ({count:,} parameters), "
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
