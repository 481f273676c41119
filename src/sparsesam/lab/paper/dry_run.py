"""Dry runs of a recipe: estimates its cost, and takes two steps of each run on random images to check it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
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
from sparsesam.lab.paper.figures import analysis_forwards
from sparsesam.lab.paper.recipe import Recipe
from sparsesam.utils.memory import SavedBytes

#: Steps, and images per step on a CPU, unless a smaller ascent fraction needs more. A CPU core does some 50 GFLOP per
#: second: steps of more than CPU_FLOPS take minutes.
STEPS, CPU_BATCH, CPU_FLOPS = 2, 2, 2e12
#: The speed of the paper's A100 implied by its table 10: ResNet-18, 50,000 images per epoch, two forward-backward
#: passes of three times the forward's 1.11 GFLOP each, in 13.60 s.
PAPER_TFLOPS = 50_000 * 2 * 3 * 1.1108 / 13.60 / 1e3
#: Classes, channels, side and training images of each data set.
SHAPES = {
    "digits": (10, 1, 8, 1000),
    "cifar10": (10, 3, 32, 50_000),
    "cifar100": (100, 3, 32, 50_000),
    "imagenet": (1000, 3, 224, 1_281_167),
}


class Cost(NamedTuple):
    """Of a run, or of the analysis of its network, which takes no steps; ``passes``: forward-backward."""

    steps: int
    passes: float
    flops: float
    memory: float = 0.0


@cache
def measure_model(name: str, dataset: str) -> tuple[int, float, float]:
    """Returns a model's parameters, the operations of a forward per image, and the bytes saved for its backward.

    It is built on the meta device, without memory or arithmetic.
    """
    if dataset not in SHAPES:
        raise ValueError(
            f"dataset must be one of {', '.join(SHAPES)} for a dry run, which loads no data, got {dataset!r}"
        )
    classes, channels, side, _ = SHAPES[dataset]
    with torch.device("meta"):
        model, images = build_model(name, classes, channels, side), torch.empty(2, channels, side, side)
    saved = SavedBytes(model.parameters())
    with FlopCounterMode(display=False) as counter, saved.counted():
        model(images)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return parameters, counter.get_total_flops() / len(images), saved.total / len(images)


def run_cost(config: TrainConfig) -> Cost:
    """Estimate the cost of a run: a backward pass costs two forward passes, the optimizer's arithmetic nothing.

    Memory holds weights, gradients and the base optimizer's state. A step adds the saved weights to restore after the
    ascent, a mask, and the batch's activations, half as large in 16 bits but with 16-bit copies of the weights. A
    Fisher information adds sums and scores, and the float32 activations of one image with their gradients.
    """
    parameters, flops, saved = measure_model(config.model, config.dataset)
    images = SHAPES[config.dataset][-1]
    per_epoch = math.ceil(min(config.train_size or images, images) / config.batch_size)
    steps, halves = config.total_steps(per_epoch), config.precision in ("bf16", "fp16")
    passes = steps * passes_per_step(config, epochs=steps / per_epoch)
    state = 12 if (config.optimizer if config.is_plain else config.base) == "sgd" else 16
    needed = config.batch_size * saved * (0.5 if halves else 1) + parameters * (2 if halves else 0)
    needed += 0.0 if config.is_plain else parameters * 4.125
    if config.optimizer == "ssam-f":
        masks = math.ceil(steps / config.steps_between_masks(per_epoch))
        passes += masks * config.fisher_samples / config.batch_size
        needed = max(needed, 2 * saved + parameters * 8)
    return Cost(steps, passes, passes * 3 * flops * config.batch_size, parameters * state + needed)


def analysis_costs(recipe: Recipe) -> list[Cost]:
    """Estimate the passes of the figure's analysis, which measures one network of each cell."""
    found = []
    for config in (recipe.config(row, column) for row, column in recipe.cells):
        if images := analysis_forwards(recipe, config):
            _, flops, _ = measure_model(config.model, config.dataset)
            found.append(Cost(0, images / (3 * config.batch_size), images * flops))
    return found


def dry_run(recipe: Recipe) -> Iterator[str]:
    """Dry-run every run of a recipe with one seed; yields a line about each."""
    for label, config in recipe.sweep([0]).variants.items():
        try:
            yield f"{label}: {take_steps(config)}"
        except Exception as error:
            raise RunError(f"{recipe.label}: {label} cannot run: {type(error).__name__}: {error}") from error


def take_steps(config: TrainConfig) -> str:
    """Build the run's model and optimizer and take two steps, on a CPU with a few images and if it takes seconds.

    Errors are those of the run itself, such as too little memory of a GPU, which uses the run's batch size.
    """
    fabric, short = make_fabric(config, RunEnvironment()), config
    if fabric.device.type != "cuda":
        flops = STEPS * 6 * CPU_BATCH * measure_model(config.model, config.dataset)[1]
        if flops > CPU_FLOPS:
            build_on_meta(config)
            return f"built, no steps: two steps take {flops / 1e12:.0f} TFLOP, too much for a CPU"
        batch = max(CPU_BATCH, round(1 / config.ascent_fraction))
        short = replace(config, batch_size=batch, fisher_samples=2)
    short = replace(short, train_size=STEPS * short.batch_size, test_size=1, max_steps=None)
    if not config.is_plain:
        short = replace(short, mask_steps=1)  # so that a mask is computed and updated
    training = make_training(short, _random_splits(short), fabric, RunEnvironment())
    training.advance(lambda: False, lambda: None)
    return plural(training.steps_taken, "step")


def build_on_meta(config: TrainConfig) -> None:
    """Build model and optimizer without memory."""
    *shape, images = SHAPES[config.dataset]
    with torch.device("meta"):
        model = build_model(config.model, *shape)
    make_optimizer(config, model, fisher_data=[], steps_per_epoch=math.ceil(images / config.batch_size))


def _random_splits(config: TrainConfig) -> Splits:
    """Returns images of the data set's shape, all views of one random image."""
    classes, channels, side, _ = SHAPES[config.dataset]
    image = torch.zeros(1, channels, side, side, dtype=torch.uint8).random_(generator=torch.Generator().manual_seed(0))
    count = max(classes, config.train_size or 0)
    whole = Labelled(image.expand(count, -1, -1, -1), torch.arange(count) % classes)
    names, mean, std = tuple(map(str, range(classes))), (0.5,) * channels, (0.25,) * channels
    return Splits(whole, whole, name=config.dataset, classes=names, mean=mean, std=std)


def cost_table(recipe: Recipe, *, seeds: int, tflops: float) -> Table:
    """Returns a table with the cost of each kind of run, of the figure's analysis, and the total over all seeds."""
    drawn = Table(title=f"{recipe.place}, estimated", caption="passes: forward-backward passes over a batch")
    drawn.add_column("one seed", overflow="fold", min_width=16)
    for heading in ("runs", "steps", "passes", "PFLOP", "GPU\nhours", "GPU\nmemory"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    groups: dict[str, list[Cost]] = {}
    for config in recipe.sweep([0]).variants.values():
        groups.setdefault(f"{config.model} on {config.dataset}, {config.optimizer}", []).append(run_cost(config))
    runs, analysis = [cost for costs in groups.values() for cost in costs], analysis_costs(recipe)
    if analysis:
        groups["analysis of the trained networks"] = analysis
    groups[f"all, {plural(seeds, 'seed')}"] = [*(seeds * runs), *analysis]
    for label, costs in groups.items():
        steps, passes, flops, memory = zip(Cost(0, 0.0, 0.0), *costs, strict=True)
        shown = [f"{sum(map(bool, steps)):,}", f"{sum(steps):,}"] if any(steps) else ["–", "–"]
        shown += [f"{sum(passes):,.0f}", f"{sum(flops) / 1e15:,.1f}", f"{sum(flops) / (tflops * 1e12) / 3600:,.1f}"]
        drawn.add_row(label, *shown, f"{max(memory) / 2**30:.1f} GiB" if any(memory) else "–")
    return drawn
