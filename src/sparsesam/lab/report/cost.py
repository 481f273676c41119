"""What a step of each variant costs: measured time where it can be compared, else a count that always can."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparsesam.lab.display.numbers import Number, number, ratio
from sparsesam.lab.experiment.config import PLAIN
from sparsesam.lab.report.variants import Task, Variant


@dataclass(frozen=True)
class Cost:
    """``values`` by variant; ``column`` and ``axis`` say what they are, ``explanation`` how they were obtained."""

    column: str
    axis: str
    explanation: str
    unit: str
    values: Mapping[Variant, Number]

    def show(self, variant: Variant) -> str:
        return f"{ratio(self.values[variant])} {self.unit}"


def cost_of(task: Task) -> Cost:
    """Times only if the task's finished variants were calibrated together; otherwise forward-backward passes."""
    return _passes(task)


def _passes(task: Task) -> Cost:
    return Cost(
        column="passes / step",
        axis="forward-backward passes per step",
        explanation="Cost is counted in forward-backward passes per step, masks included; it is not time: these runs "
        "were not calibrated together.",
        unit="passes per step",
        values={variant: _passes_per_step(variant) for variant in task.variants},
    )


def _passes_per_step(variant: Variant) -> Number:
    counted = variant.values("forward_backwards_per_step")
    return statistics.median(counted) if counted else nominal_passes(variant.settings)


def nominal_passes(settings: Mapping[str, Any]) -> float:
    """Passes of a step by the settings alone, for runs that recorded no count: 1 for SGD, 2 for SAM."""
    if settings.get("optimizer") in PLAIN or settings.get("ascent") == "momentum":
        return 1.0
    fraction, every = number(settings.get("ascent_fraction")) or 1.0, number(settings.get("ascent_every")) or 1.0
    epochs, start = number(settings.get("epochs")) or 1.0, number(settings.get("ascent_start")) or 0.0
    return 1.0 + fraction / every * max(0.0, 1.0 - start / epochs)
