"""Dry runs of a recipe: every model and optimizer is built, and takes two steps on random images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.table import Table

from sparsesam.lab.data import Labelled, Splits
from sparsesam.lab.display import plural
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.errors import RunError
from sparsesam.lab.experiment.optimizers import make_optimizer
from sparsesam.lab.experiment.run import make_fabric, make_training
from sparsesam.lab.models import build_model
from sparsesam.lab.paper.cost import RunCost, cost, measured_model, shape_of, total
from sparsesam.lab.paper.recipe import Recipe

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


def dry_run(recipe: Recipe, on_run: Callable[[str, DryRun], None]) -> list[DryRun]:
    """Every run of a recipe with one seed; ``on_run`` is called after each."""
    found = []
    for label, config in recipe.sweep([0]).variants.items():
        try:
            found.append(dry_run_config(config))
        except Exception as error:
            raise RunError(f"{recipe.label}: {label} cannot run: {type(error).__name__}: {error}") from error
        on_run(label, found[-1])
    return found


def dry_run_config(config: TrainConfig) -> DryRun:
    """Build the run's model and optimizer, and take two steps where memory and time allow.

    Errors are those that the run itself would end with. A GPU gets the run's own batch size, a CPU a few images.
    """
    fabric, estimate = make_fabric(config, RunEnvironment()), cost(config)
    reason = _why_not(config, estimate, fabric.device)
    if reason:
        build_on_meta(config)
        return DryRun(config, estimate, 0, reason)
    short = config
    if fabric.device.type != "cuda":
        batch = max(CPU_BATCH, round(1 / config.ascent_fraction))
        short = replace(config, batch_size=batch, fisher_samples=2, fisher_batch=2)
    short = replace(short, train_size=STEPS * short.batch_size, test_size=1, max_steps=None)
    if not config.is_plain:
        short = replace(short, mask_steps=1)  # so that a mask is made, and refreshed
    training = make_training(short, _random_splits(short), fabric, RunEnvironment())
    training.advance(lambda: False, lambda: None)
    return DryRun(config, estimate, training.steps_taken)


def build_on_meta(config: TrainConfig) -> None:
    """Model and optimizer without memory."""
    shape = shape_of(config)
    with torch.device("meta"):
        model = build_model(config.model, *shape[:3])
    make_optimizer(config, model, fisher_data=[], steps_per_epoch=math.ceil(shape.train / config.batch_size))


def _random_splits(config: TrainConfig) -> Splits:
    """Images of the data set's shape; all are views of one random image, whatever their number."""
    classes, channels, side, _ = shape_of(config)
    image = torch.zeros(1, channels, side, side, dtype=torch.uint8).random_(generator=torch.Generator().manual_seed(0))
    count = max(classes, config.train_size or 0)
    whole = Labelled(image.expand(count, -1, -1, -1), torch.arange(count) % classes)
    return Splits(
        train=whole,
        test=whole,
        name=config.dataset,
        classes=tuple(map(str, range(classes))),
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
    )


def _why_not(config: TrainConfig, estimate: RunCost, device: torch.device) -> str:
    """Why this machine should not take the steps."""
    free: float | None
    if device.type == "cuda":
        free, needed = torch.cuda.mem_get_info(device)[0], estimate.memory
    else:
        model = measured_model(config.model, shape_of(config))
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


def cost_table(recipe: Recipe, runs: Sequence[DryRun], *, seeds: int, tflops: float) -> Table:
    """Each kind of run with its cost, and the sum over the seeds."""
    drawn = Table(title=f"{recipe.place}, estimated", caption="passes are forward-backwards of a batch")
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
