"""Dry runs of a recipe: takes two steps of each run on random images to check it, and estimates its cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache

import numpy as np
import torch
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

#: A CPU takes steps of at least two images, if both take seconds: a core does some 50 GFLOP per second.
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


@cache
def measure_model(name: str, dataset: str) -> tuple[torch.nn.Module, float]:
    """Returns a model on the meta device, without memory or arithmetic, and the operations of a forward per image."""
    if dataset not in SHAPES:
        raise ValueError(f"dataset must be one of {', '.join(SHAPES)} for a dry run, got {dataset!r}")
    classes, channels, side, _ = SHAPES[dataset]
    with torch.device("meta"):
        model, images = build_model(name, classes, channels, side), torch.empty(2, channels, side, side)
    with FlopCounterMode(display=False) as counter:
        model(images)
    return model, counter.get_total_flops() / len(images)


def run_cost(config: TrainConfig) -> tuple[int, float, float]:
    """Estimate steps, forward-backward passes over a batch, and operations of a run.

    A backward pass costs two forward passes, the optimizer's arithmetic nothing.
    """
    flops, images = measure_model(config.model, config.dataset)[1], SHAPES[config.dataset][-1]
    per_epoch = math.ceil(min(config.train_size or images, images) / config.batch_size)
    steps = config.total_steps(per_epoch)
    passes = steps * passes_per_step(config, epochs=steps / per_epoch)
    if config.optimizer == "ssam-f":
        passes += math.ceil(steps / config.steps_between_masks(per_epoch)) * config.fisher_samples / config.batch_size
    return steps, passes, passes * 3 * flops * config.batch_size


def dry_run(recipe: Recipe, *, seeds: int, tflops: float) -> Iterator[str]:
    """Dry-run every run of a recipe with one seed; yields a line about each, with its estimated cost, and the total."""

    def estimate(steps: float, passes: float, flops: float) -> str:
        work = f"{steps:,.0f} steps, {passes:,.0f} forward-backward passes, {flops / 1e15:,.1f} PFLOP"
        return f"{work}, {flops / (tflops * 1e12) / 3600:,.1f} GPU hours"

    total, analysis = np.zeros(3), np.zeros(3)
    for label, config in recipe.sweep([0]).variants.items():
        try:
            done, cost = take_steps(config), run_cost(config)
        except Exception as error:
            raise RunError(f"{recipe.label}: {label} cannot run: {type(error).__name__}: {error}") from error
        total += seeds * np.array(cost)
        yield f"{label}: {done}; estimated: {estimate(*cost)}"
    for config in recipe.configs if recipe.forwards else ():  # one network of each cell is measured
        images = recipe.forwards * recipe.analysis.get("samples", config.batch_size)
        flops = images * measure_model(config.model, config.dataset)[1]
        analysis += (0, images / (3 * config.batch_size), flops)
    if recipe.forwards:
        yield f"analysis of the trained networks: {estimate(*analysis)}"
    yield f"all, {plural(seeds, 'seed')}: {estimate(*total + analysis)}"


def take_steps(config: TrainConfig) -> str:
    """Build the run's model and optimizer and take two steps, on a CPU with a few images and if it takes seconds.

    Errors are those of the run itself, such as too little memory of a GPU, which uses the run's batch size.
    """
    fabric, batch = make_fabric(config, RunEnvironment()), config.batch_size
    model, flops = measure_model(config.model, config.dataset)
    classes, channels, side, images = SHAPES[config.dataset]
    if fabric.device.type != "cuda":
        batch = max(CPU_BATCH, round(1 / config.ascent_fraction))
        if (total := STEPS * 6 * CPU_BATCH * flops) > CPU_FLOPS:
            make_optimizer(config, deepcopy(model), fisher_data=[], steps_per_epoch=images // config.batch_size)
            return f"built, no steps: two steps take {total / 1e12:.0f} TFLOP, too much for a CPU"
    short = replace(config, batch_size=batch, train_size=STEPS * batch, test_size=1, max_steps=None, fisher_samples=2)
    if not config.is_plain:
        short = replace(short, mask_steps=1)  # so that a mask is computed and updated
    splits = random_splits(max(classes, STEPS * batch), classes, channels, side)
    training = make_training(short, splits, fabric, RunEnvironment())
    training.advance(lambda: False, lambda: None)
    return plural(training.steps_taken, "step")


def random_splits(count: int, classes: int, channels: int, side: int) -> Splits:
    """Returns ``count`` training and test images, all views of one random image."""
    image = torch.zeros(1, channels, side, side, dtype=torch.uint8).random_(generator=torch.Generator().manual_seed(0))
    part = Labelled(image.expand(count, -1, -1, -1), torch.arange(count) % classes)
    names, mean, std = tuple(map(str, range(classes))), (0.5,) * channels, (0.25,) * channels
    return Splits(part, part, name="random", classes=names, mean=mean, std=std)
