"""Dry runs of a recipe: every model and optimizer is built, and takes two steps on random images."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from sparsesam.lab import models
from sparsesam.lab.data import Labelled, Splits
from sparsesam.lab.display import plural
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.errors import RunError
from sparsesam.lab.experiment.optimizers import make_optimizer
from sparsesam.lab.experiment.run import make_fabric, make_training
from sparsesam.lab.paper.cost import RunCost, cost, measured_model, shape_of, total
from sparsesam.lab.paper.recipe import Recipe, Scale

STEPS = 2
#: Images a step on a CPU, where the ascent uses all of them; a quarter must be one at least.
CPU_BATCH = 2
#: A CPU does some 50 GFLOP a second on a core: more than this is minutes.
CPU_FLOPS = 2e12


@dataclass(frozen=True)
class DryRun:
    """``steps`` taken, and why not more."""

    config: TrainConfig
    cost: RunCost
    steps: int
    reason: str = ""


def dry_run_config(config: TrainConfig) -> DryRun:
    """Build the run's model and optimizer, and take two steps where memory and time allow.

    Errors are those that the run itself would end with. A GPU gets the run's own batch size, a CPU a few images.
    """
    fabric, estimate = make_fabric(config, RunEnvironment()), cost(config)
    reason = _why_not(config, estimate, fabric.device)
    if reason:
        build_on_meta(config)
        return DryRun(config, estimate, 0, reason)
    batch = config.batch_size if fabric.device.type == "cuda" else max(CPU_BATCH, round(1 / config.ascent_fraction))
    short = replace(config, batch_size=batch, train_size=STEPS * batch, test_size=1, max_steps=None)
    if fabric.device.type != "cuda":
        short = replace(short, fisher_samples=2)
    if not config.is_plain:
        short = replace(short, mask_steps=1)  # so that a mask is made, and refreshed
    training = make_training(short, _random_splits(config, short), fabric, RunEnvironment())
    training.advance(lambda: False, lambda: None)
    return DryRun(config, estimate, training.steps_taken)


def dry_run(
    chosen: Recipe, scale: Scale, overrides: Mapping[str, Any], on_run: Callable[[str, DryRun], None]
) -> list[DryRun]:
    """Every run of a recipe with one seed; ``on_run`` is called after each."""
    found = []
    for label, config in chosen.sweep(scale, [0], overrides).variants.items():
        try:
            found.append(dry_run_config(config))
        except Exception as error:
            raise RunError(f"{chosen.label}: {label} cannot run: {type(error).__name__}: {error}") from error
        on_run(label, found[-1])
    return found


def cost_table(chosen: Recipe, found: Iterable[DryRun], *, seeds: int, tflops: float) -> Table:
    """Each kind of run with its cost, and the sum over the seeds."""
    runs = list(found)
    drawn = Table(title=f"{chosen.place}, estimated", caption="passes are forward-backwards of a batch")
    drawn.add_column("one seed", overflow="fold", min_width=16)
    for heading in ("runs", "steps", "passes", "PFLOP", "GPU\nhours", "GPU\nmemory"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    groups: dict[str, list[DryRun]] = {}
    for one in runs:
        groups.setdefault(f"{one.config.model} on {one.config.dataset}, {one.config.optimizer}", []).append(one)
    for label, members in groups.items():
        drawn.add_row(label, *_shown(total(one.cost for one in members), tflops))
    drawn.add_section()
    drawn.add_row(f"all, {plural(seeds, 'seed')}", *_shown(total(seeds * [one.cost for one in runs]), tflops))
    return drawn


def _shown(one: RunCost, tflops: float) -> list[str]:
    return [
        str(one.runs),
        f"{one.steps:,}",
        f"{one.passes:,.0f}",
        f"{one.flops / 1e15:,.1f}",
        f"{one.hours(tflops):,.1f}",
        f"{one.memory / 2**30:.1f} GiB",
    ]


def build_on_meta(config: TrainConfig) -> None:
    """Model and optimizer without memory."""
    shape = shape_of(config)
    with torch.device("meta"):
        model = models.build_model(config.model, shape.classes, shape.channels, shape.side)
    steps = math.ceil(shape.train / config.batch_size)
    make_optimizer(config, model, fisher_data=[], steps_per_epoch=steps)


def _random_splits(config: TrainConfig, short: TrainConfig) -> Splits:
    """Random images of the data set's shape; all are views of one batch, whatever their number."""
    shape, generator = shape_of(config), torch.Generator().manual_seed(0)
    assert short.train_size is not None
    count = max(shape.classes, short.train_size)
    size = (1, shape.channels, shape.side, shape.side)
    image = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    images, labels = image.expand(count, -1, -1, -1), torch.arange(count) % shape.classes
    classes = tuple(str(number) for number in range(shape.classes))
    mean, std = (0.5,) * shape.channels, (0.25,) * shape.channels
    whole = Labelled(images, labels)
    return Splits(train=whole, test=whole, name=config.dataset, classes=classes, mean=mean, std=std)


def _why_not(config: TrainConfig, estimate: RunCost, device: torch.device) -> str:
    """Why this machine should not take the steps."""
    free: float | None
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        needed = estimate.memory
    else:
        model = measured_model(config.model, *shape_of(config)[:3])
        flops = STEPS * 6 * CPU_BATCH * model.forward_flops
        if flops > CPU_FLOPS:
            return f"two steps are {flops / 1e12:.0f} TFLOP, too many for a CPU"
        free, needed = _free_memory(), 36.0 * model.parameters + 2 * CPU_BATCH * model.saved_bytes
    if free is not None and needed > free:
        return f"two steps need about {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} are free"
    return ""


def _free_memory() -> float | None:
    """Bytes available without swapping; None where the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), None)
