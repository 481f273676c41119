"""Overhead of the training loop of ``sparsesam train`` over a minimal loop: SGD, the same model, images and batches.

python -m benchmarks.throughput [--rounds 15] [--warmup 2] [--threads 2] [--cpu-time]

A round is a few steps of each. The minimal loop reads normalized images from memory and does nothing else; ours draws
the order, normalizes, computes loss and accuracy, checks for a non-finite loss and Ctrl-C, and in the last case also
augments.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.timing import arguments, begin, compare
from sparsesam.lab import models
from sparsesam.lab.data import Labelled, Splits
from sparsesam.lab.experiment.batches import Batches
from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.experiment.training import Training

CPU = torch.device("cpu")


def main() -> None:
    options = begin(arguments(__doc__, rounds=15, warmup=2, threads=2))
    for model, side, batch, steps in (("resnet18", 32, 32, 3), ("small-cnn", 8, 64, 30)):
        made = cases(model, side, batch, steps)
        print(f"{model}, batch {batch}, {options.rounds} interleaved rounds of {steps} steps")
        for row in compare(made, "bare loop", options):
            rate = steps * batch / row.seconds
            quartiles = f"{1 / row.high:.3f} to {1 / row.low:.3f}"
            print(f"  {row.name:32} {rate:8.0f} images/s  {1 / row.median:.3f} of the bare loop ({quartiles})")


def cases(name: str, side: int, batch: int, steps: int) -> dict[str, Callable[[], None]]:
    splits = _images(side, batch * steps)
    torch.manual_seed(0)
    model = models.build_model(name, 10, 3, side)
    return {
        "bare loop": _bare(copy.deepcopy(model), splits, batch),
        "sparsesam train": _ours(copy.deepcopy(model), name, splits, batch, augment=False),
        "sparsesam train, augmentation": _ours(copy.deepcopy(model), name, splits, batch, augment=True),
    }


def _images(side: int, count: int) -> Splits:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, side, side), generator=generator, dtype=torch.uint8)
    part = Labelled(images, torch.arange(count) % 10)
    return Splits(part, part, name="random", classes=tuple("0123456789"), mean=(0.5,) * 3, std=(0.25,) * 3)


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


if __name__ == "__main__":
    main()
