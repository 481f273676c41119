"""Who is told how a run goes: a terminal, a log, or nobody."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol

from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.experiment.training import Training


class Observer(Protocol):
    def begin(self, config: TrainConfig, training: Training, where: str) -> None:
        """Training starts, or goes on, in the directory ``where``."""

    def step(self, training: Training) -> None:
        """A step was taken."""

    def epoch(self, record: Mapping[str, Any]) -> None:
        """An epoch is complete and tested."""

    def end(self) -> None:
        """Nothing more will come, whether or not the run is complete."""


class Silent:
    """Tells nobody."""

    def begin(self, config: TrainConfig, training: Training, where: str) -> None: ...

    def step(self, training: Training) -> None: ...

    def epoch(self, record: Mapping[str, Any]) -> None: ...

    def end(self) -> None: ...


class Lines:
    """A line per epoch, for logs."""

    def begin(self, config: TrainConfig, training: Training, where: str) -> None:
        print(headline(config, training, where), flush=True)

    def step(self, training: Training) -> None: ...

    def epoch(self, record: Mapping[str, Any]) -> None:
        print(epoch_line(record), flush=True)

    def end(self) -> None: ...


def headline(config: TrainConfig, training: Training, where: str) -> str:
    count = sum(parameter.numel() for parameter in training.module.parameters())
    begun = f", going on after {training.steps_taken} steps" if training.steps_taken else ""
    return (
        f"{config.optimizer} on {config.dataset} with {config.model} ({count:,} parameters), "
        f"{config.epochs} epochs of {training.batches.steps} steps{begun}; {where}"
    )


def epoch_line(record: Mapping[str, Any]) -> str:
    perturbed = "" if record["sparsity"] is None else f"  density {1 - record['sparsity']:.3f}  rho {record['rho']:.3g}"
    return (
        f"epoch {record['epoch']:3d}  loss {record['train_loss']:.4f}  train {record['train_accuracy']:6.2%}  "
        f"test {record['test_accuracy']:6.2%}  {record['images_per_second']:,.0f} images/s{perturbed}"
    )


def for_terminal(*, quiet: bool) -> Observer:
    """A live bar on a terminal, a line per epoch elsewhere."""
    if quiet:
        return Silent()
    if not sys.stdout.isatty():
        return Lines()
    from sparsesam.lab.experiment.live import Live

    return Live()
