"""Dry runs of a recipe: estimates the cost of its runs, and takes two steps of each on random images to check them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from sparsesam.lab.data import Labelled, Splits
from sparsesam.lab.display import plural
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.cost import passes_per_step
from sparsesam.lab.experiment.errors import RunError
from sparsesam.lab.experiment.optimizers import make_optimizer
from sparsesam.lab.experiment.run import make_fabric, make_training
from sparsesam.lab.models import build_model
from sparsesam.lab.paper.recipe import Recipe
from sparsesam.utils.memory import SavedBytes, free_bytes

STEPS = 2
#: Images per step on a CPU if the ascent uses the whole batch; smaller ascent fractions need at least one image.
CPU_BATCH = 2
#: A CPU core does some 50 GFLOP per second: more than this takes minutes.
CPU_FLOPS = 2e12
#: The speed of the paper's A100 implied by its table 10: ResNet-18, 50,000 images per epoch, two forward-backward
#: passes of three times the forward's 1.11 GFLOP each, in 13.60 s.
PAPER_TFLOPS = 50_000 * 2 * 3 * 1.1108 / 13.60 / 1e3


class Shape(NamedTuple):
    """Shape of a data set: the arguments of a model, and the number of images per epoch."""

    classes: int
    channels: int
    side: int
    train: int


SHAPES = {
    "digits": Shape(10, 1, 8, 1000),
    "cifar10": Shape(10, 3, 32, 50_000),
    "cifar100": Shape(100, 3, 32, 50_000),
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
    """Cost of one run, or the sum over several, with the largest ``memory``. ``passes`` are forward-backward passes."""

    runs: int
    steps: int
    passes: float
    flops: float
    memory: float

    def hours(self, tflops: float) -> float:
        return self.flops / (tflops * 1e12) / 3600


def cost(config: TrainConfig) -> RunCost:
    """Estimate the cost of a run: a backward pass costs two forward passes, the optimizer's arithmetic nothing."""
    shape, model = shape_of(config), measured_model(config.model, shape_of(config))
    per_epoch = math.ceil(min(config.train_size or shape.train, shape.train) / config.batch_size)
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
    """Per image: operations of a forward pass, and bytes that a float32 forward saves for the backward."""

    parameters: int
    forward_flops: float
    saved_bytes: float


@cache
def measured_model(name: str, shape: Shape) -> MeasuredModel:
    """Measure a model on the meta device, without memory or arithmetic."""
    with torch.device("meta"):
        model = build_model(name, *shape[:3])
        images = torch.empty(2, shape.channels, shape.side, shape.side)
    saved = SavedBytes(model.parameters())
    with FlopCounterMode(display=False) as counter, saved.counted():
        model(images)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return MeasuredModel(parameters, counter.get_total_flops() / len(images), saved.total / len(images))


def _memory(config: TrainConfig, model: MeasuredModel) -> float:
    """Returns the bytes of a step or of a Fisher measurement, whichever is larger.

    Both hold weights, gradients and the base optimizer's state. A step adds the saved weights to restore after the
    ascent, a mask, and the batch's activations, half as large in 16 bits but with 16-bit copies of the weights. The
    Fisher information adds sums and scores, and the float32 activations of one image with their gradients.
    """
    is_adam = (config.optimizer if config.is_plain else config.base) != "sgd"
    held = model.parameters * (4 + 4 + (8 if is_adam else 4))
    halves = config.precision != "fp32"
    step = config.batch_size * model.saved_bytes * (0.5 if halves else 1) + model.parameters * (2 if halves else 0)
    if not config.is_plain:
        step += model.parameters * 4.125
    fisher = 2 * model.saved_bytes + model.parameters * 8 if config.optimizer == "ssam-f" else 0.0
    return held + max(step, fisher)


@dataclass(frozen=True)
class DryRun:
    """``steps`` is the number of steps taken; ``reason`` says why none were taken."""

    config: TrainConfig
    cost: RunCost
    steps: int
    reason: str = ""


def dry_run(recipe: Recipe) -> Iterator[tuple[str, DryRun]]:
    """Dry-run every run of a recipe with one seed; yields (label, result)."""
    for label, config in recipe.sweep([0]).variants.items():
        try:
            found = dry_run_config(config)
        except Exception as error:
            raise RunError(f"{recipe.label}: {label} cannot run: {type(error).__name__}: {error}") from error
        yield label, found


def dry_run_config(config: TrainConfig) -> DryRun:
    """Build the run's model and optimizer, and take two steps if memory and time allow.

    Errors are those of the run itself. A GPU uses the run's batch size, a CPU a few images.
    """
    fabric, estimate = make_fabric(config, RunEnvironment()), cost(config)
    reason = _why_not(config, estimate, fabric.device)
    if reason:
        build_on_meta(config)
        return DryRun(config, estimate, 0, reason)
    short = config
    if fabric.device.type != "cuda":
        batch = max(CPU_BATCH, round(1 / config.ascent_fraction))
        short = replace(config, batch_size=batch, fisher_samples=2)
    short = replace(short, train_size=STEPS * short.batch_size, test_size=1, max_steps=None)
    if not config.is_plain:
        short = replace(short, mask_steps=1)  # so that a mask is computed and updated
    training = make_training(short, _random_splits(short), fabric, RunEnvironment())
    training.advance(lambda: False, lambda: None)
    return DryRun(config, estimate, training.steps_taken)


def build_on_meta(config: TrainConfig) -> None:
    """Build model and optimizer without memory."""
    shape = shape_of(config)
    with torch.device("meta"):
        model = build_model(config.model, *shape[:3])
    make_optimizer(config, model, fisher_data=[], steps_per_epoch=math.ceil(shape.train / config.batch_size))


def _random_splits(config: TrainConfig) -> Splits:
    """Returns images of the data set's shape, all views of one random image."""
    classes, channels, side, _ = shape_of(config)
    image = torch.zeros(1, channels, side, side, dtype=torch.uint8).random_(generator=torch.Generator().manual_seed(0))
    count = max(classes, config.train_size or 0)
    whole = Labelled(image.expand(count, -1, -1, -1), torch.arange(count) % classes)
    names, mean, std = tuple(map(str, range(classes))), (0.5,) * channels, (0.25,) * channels
    return Splits(whole, whole, name=config.dataset, classes=names, mean=mean, std=std)


def _why_not(config: TrainConfig, estimate: RunCost, device: torch.device) -> str:
    """Returns why this machine should not take the steps; empty if it should."""
    needed = estimate.memory
    if device.type != "cuda":
        model = measured_model(config.model, shape_of(config))
        flops = STEPS * 6 * CPU_BATCH * model.forward_flops
        if flops > CPU_FLOPS:
            return f"two steps take {flops / 1e12:.0f} TFLOP, too much for a CPU"
        needed = 36.0 * model.parameters + 2 * CPU_BATCH * model.saved_bytes
    free = free_bytes(device)
    if free is not None and needed > free:
        return f"two steps need about {needed / 2**30:.0f} GiB, but {free / 2**30:.0f} are free"
    return ""


def cost_table(recipe: Recipe, runs: Sequence[DryRun], *, seeds: int, tflops: float) -> Table:
    """Returns a table with the cost of each kind of run and the total over all seeds."""
    drawn = Table(title=f"{recipe.place}, estimated", caption="passes: forward-backward passes over a batch")
    drawn.add_column("one seed", overflow="fold", min_width=16)
    for heading in ("runs", "steps", "passes", "PFLOP", "GPU\nhours", "GPU\nmemory"):
        drawn.add_column(heading, justify="right", no_wrap=True)

    def add_row(label: str, costs: Sequence[RunCost]) -> None:
        one = total(costs)
        counts = (str(one.runs), f"{one.steps:,}", f"{one.passes:,.0f}", f"{one.flops / 1e15:,.1f}")
        drawn.add_row(label, *counts, f"{one.hours(tflops):,.1f}", f"{one.memory / 2**30:.1f} GiB")

    groups: dict[str, list[RunCost]] = {}
    for one in runs:
        kind = f"{one.config.model} on {one.config.dataset}, {one.config.optimizer}"
        groups.setdefault(kind, []).append(one.cost)
    for label, costs in groups.items():
        add_row(label, costs)
    drawn.add_section()
    add_row(f"all, {plural(seeds, 'seed')}", seeds * [one.cost for one in runs])
    return drawn
