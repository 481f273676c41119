"""Overhead of the training loop of ``sparsesam train`` over a minimal loop."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.runner import Session, benchmark
from benchmarks.timing import show
from sparsesam.lab.data import Splits
from sparsesam.lab.experiment.batches import Batches
from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.experiment.training import Training
from sparsesam.lab.models import build_model
from sparsesam.lab.paper.dry_run import random_splits

CPU = torch.device("cpu")


@benchmark(rounds=15, quick={"models": ("small-cnn",)})
def throughput(session: Session, *, models: tuple[str, ...] = ("resnet18", "small-cnn")) -> None:
    """How many images per second does ``sparsesam train`` with SGD train, relative to a bare loop?

    A round is a few steps of each. The bare loop reads normalized images from memory and does nothing else; ours draws
    the order, normalizes, computes loss and accuracy, checks for a non-finite loss and Ctrl-C, and in the last case
    also augments.
    """
    for model in models:
        side, batch, steps = (8, 64, 3 if session.quick else 30) if model == "small-cnn" else (32, 32, 3)
        print(f"{model}, batch {batch} of {side}x{side}, rounds of {steps} steps")
        rows = []
        for name, ratio in session.compare(cases(model, side, batch, steps), "bare loop").items():
            speed = f"{1 / ratio.median:.3f} ({1 / ratio.high:.3f} to {1 / ratio.low:.3f})"
            rows.append((name, f"{steps * batch / ratio.seconds:.0f}", speed))
        show(" | images/s | x bare loop (quartiles)", rows)


def cases(name: str, side: int, batch: int, steps: int) -> dict[str, Callable[[], None]]:
    splits = random_splits(batch * steps, 10, 3, side)
    torch.manual_seed(0)
    model = build_model(name, 10, 3, side)
    return {
        "bare loop": _bare(copy.deepcopy(model), splits, batch),
        "sparsesam train": _ours(copy.deepcopy(model), name, splits, batch, augment=False),
        "sparsesam train, augmentation": _ours(copy.deepcopy(model), name, splits, batch, augment=True),
    }


def _bare(model: nn.Module, splits: Splits, batch: int) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    images, labels = (splits.train.images / 255 - 0.5) / 0.25, splits.train.labels

    def run() -> None:
        model.train()
        for chosen in torch.randperm(len(labels)).split(batch):
            optimizer.zero_grad()
            cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()

    return run


def _ours(model: nn.Module, name: str, splits: Splits, batch: int, *, augment: bool) -> Callable[[], None]:
    config = TrainConfig(
        model=name,
        optimizer="sgd",
        lr=0.01,
        lr_schedule="constant",
        epochs=10**6,
        batch_size=batch,
        augment="standard" if augment else "none",
    )
    fabric = Fabric(accelerator="cpu", devices=1)
    training = Training(config, model, Batches(config, splits, CPU), fabric)

    def run() -> None:
        training.advance(lambda: False)

    return run
