"""What a run will cost, before it is begun: steps, passes, floating-point operations, hours and memory of a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sparsesam.lab.data.digits import TRAIN_SIZE
from sparsesam.lab.data.published import CIFAR10, CIFAR100
from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.experiment.cost import passes_per_step
from sparsesam.lab.models import build_model

#: Operations per second that the paper's table 10 implies of its A100: ResNet-18, 50,000 images an epoch, two
#: forward-backwards each of three times the forward's 1.11 GFLOP, in 13.60 s.
PAPER_TFLOPS = 50_000 * 2 * 3 * 1.1108 / 13.60 / 1e3


class Shape(NamedTuple):
    """Of a data set: what a model must be built for, and how many images an epoch has."""

    classes: int
    channels: int
    side: int
    train: int


SHAPES = {
    "digits": Shape(10, 1, 8, TRAIN_SIZE),
    "cifar10": Shape(10, 3, 32, CIFAR10.train_size),
    "cifar100": Shape(100, 3, 32, CIFAR100.train_size),
    "imagenet": Shape(1000, 3, 224, 1_281_167),
}


def shape_of(config: TrainConfig) -> Shape:
    try:
        return SHAPES[config.dataset]
    except KeyError:
        raise ValueError(
            f"dataset must be one of {', '.join(SHAPES)} for a dry run, which loads no data, got {config.dataset!r}"
        ) from None


@dataclass(frozen=True)
class RunCost:
    """Of one run, or the sum of many: ``memory`` is then the largest. ``passes`` are forward-backwards of a batch."""

    runs: int
    steps: int
    passes: float
    flops: float
    memory: float

    def hours(self, tflops: float) -> float:
        return self.flops / (tflops * 1e12) / 3600


def cost(config: TrainConfig) -> RunCost:
    """An estimate: a backward takes twice its forward, a step's arithmetic outside of the model nothing."""
    shape, model = shape_of(config), measured_model(config.model, shape_of(config))
    images = min(config.train_size or shape.train, shape.train)
    per_epoch = math.ceil(images / config.batch_size)
    steps = config.total_steps(per_epoch)
    masks = math.ceil(steps / config.steps_between_masks(per_epoch)) if config.optimizer == "ssam-f" else 0
    fisher = masks * config.fisher_samples / config.batch_size
    passes = steps * passes_per_step(config, epochs=steps / per_epoch) + fisher
    flops = passes * 3 * model.forward_flops * config.batch_size
    return RunCost(1, steps, passes, flops, _memory(config, model))


def total(costs: Iterable[RunCost]) -> RunCost:
    found = list(costs) or [RunCost(0, 0, 0.0, 0.0, 0.0)]
    runs, steps, passes, flops, memory = zip(*map(astuple, found), strict=True)
    return RunCost(sum(runs), sum(steps), sum(passes), sum(flops), max(memory))


class MeasuredModel(NamedTuple):
    """Per image: operations of a forward, and bytes that a float32 forward keeps for its backward."""

    parameters: int
    forward_flops: float
    saved_bytes: float


@cache
def measured_model(name: str, shape: Shape) -> MeasuredModel:
    """Without memory or arithmetic, on the meta device."""
    with torch.device("meta"):
        model = build_model(name, *shape[:3])
        images = torch.empty(2, shape.channels, shape.side, shape.side)
    saved: dict[int, torch.UntypedStorage] = {}  # which keeps them, so that none takes the place of another

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        model(images)
    for parameter in model.parameters():
        saved.pop(parameter.untyped_storage()._cdata, None)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    saved_bytes = sum(storage.nbytes() for storage in saved.values())
    return MeasuredModel(parameters, counter.get_total_flops() / len(images), saved_bytes / len(images))


def _memory(config: TrainConfig, model: MeasuredModel) -> float:
    """The larger of a step's bytes and of a Fisher measurement's.

    Both hold weights, gradients and the base optimizer's state. A step adds the weights that come back after the
    ascent, a mask, and the batch's activations, half as large in 16 bits but with 16-bit copies of the weights. The
    Fisher information adds sums and scores, and in float32 its batch's activations with their gradients.
    """
    is_adam = (config.optimizer if config.is_plain else config.base) != "sgd"
    held = model.parameters * (4 + 4 + (8 if is_adam else 4))
    halves = config.precision != "fp32"
    step = config.batch_size * model.saved_bytes * (0.5 if halves else 1) + model.parameters * (2 if halves else 0)
    if not config.is_plain:
        step += model.parameters * 4.125
    fisher = 0.0
    if config.optimizer == "ssam-f":
        samples = min(config.fisher_batch or 128, config.fisher_samples)
        fisher = 2 * samples * model.saved_bytes + model.parameters * 8
    return held + max(step, fisher)
