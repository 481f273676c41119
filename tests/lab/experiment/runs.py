"""Short runs for the tests."""

from __future__ import annotations

import os
import signal
from dataclasses import fields, replace

import torch

from sparsesam.lab.experiment import checkpoint
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.observers import RunObserver
from sparsesam.lab.experiment.result import RunResult
from sparsesam.lab.experiment.run import run_training

SHORT = TrainConfig(train_size=72, test_size=40, epochs=3, batch_size=16, fisher_samples=8, optimizer="sgd", rho=0.1)


def train(out, observer=None, *, resume=False, logger="none", record_times=False, **settings):
    place = RunEnvironment(out=out, resume=resume, logger=logger, threads=1, record_times=record_times)
    return run_training(replace(SHORT, **settings), place, observer)


def words(**settings):
    """The settings as options of the command line."""
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def result_with(**values):
    """The result in a ``result.json``, with only these values known."""
    return {**dict.fromkeys(field.name for field in fields(RunResult)), **values}


def state(out):
    """Everything that a finished run saved, except the time it took."""
    content = checkpoint.load(out / "last.pt")
    content["training"].pop("sums")
    content.pop("records")
    return content


def same(first, second):
    """Whether two trees of plain values and tensors are equal, bit for bit."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


class InterruptAt(RunObserver):
    """Sends SIGINT, or another signal, to its own process after the given number of steps."""

    def __init__(self, step, kind=signal.SIGINT):
        self.at, self.kind = step, kind

    def step(self, training):
        if training.steps_taken == self.at:
            os.kill(os.getpid(), self.kind)
