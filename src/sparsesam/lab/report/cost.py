"""What each variant costs: measured time where it can be compared, else a count that always can."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsesam.lab.display.numbers import Number, number, ratio
from sparsesam.lab.experiment.calibration import SweepCalibration
from sparsesam.lab.experiment.config import PLAIN
from sparsesam.lab.experiment.cost import passes_per_step
from sparsesam.lab.report.names import optimizer_name
from sparsesam.lab.report.variants import Task, Variant


@dataclass(frozen=True)
class VariantCosts:
    """``values`` by variant; ``column`` and ``axis`` say what they are, ``explanation`` how they were obtained."""

    column: str
    axis: str
    explanation: str
    unit: str
    values: Mapping[Variant, Number]

    def show(self, variant: Variant) -> str:
        return f"{ratio(self.values[variant])} {self.unit}"


def cost_of(task: Task, calibrations: Sequence[SweepCalibration] = ()) -> VariantCosts:
    """Times only if all finished variants of the task were measured together; otherwise forward-backward passes."""
    finished = [variant for variant in task.variants if variant.finished]
    plain = _plain(finished)
    for calibration in calibrations:
        if plain is not None and all(calibration.seconds_per_epoch(variant.hashes) for variant in finished):
            return _times(task, plain, calibration)
    return _passes(task, plain)


def _plain(variants: Sequence[Variant]) -> Variant | None:
    """The variant that costs are relative to."""
    return next((variant for variant in variants if variant.optimizer in PLAIN), None)


def _times(task: Task, plain: Variant, calibration: SweepCalibration) -> VariantCosts:
    name, unit = optimizer_name(plain.optimizer), calibration.seconds_per_epoch(plain.hashes)
    seconds = {
        variant: _times_length(calibration.seconds_per_epoch(variant.hashes), variant, plain)
        for variant in task.variants
    }
    cpu = calibration.origin.get("cpu")
    where = f" on {cpu}" if cpu else ""
    return VariantCosts(
        column=f"time / {name}",
        axis=f"time of a run / {name}’s",
        explanation=f"Cost is time, masks included: all variants were measured together, in turns{where}.",
        unit=f"× {name}’s time",
        values={variant: one / unit if one and unit else None for variant, one in seconds.items()},
    )


def _passes(task: Task, plain: Variant | None) -> VariantCosts:
    """Counted passes relative to those of plain steps; by the settings alone if a run has no count."""
    counts = {variant: _times_length(_passes_per_step(variant), variant, plain) for variant in task.variants}
    unit = counts[plain] if plain is not None else None
    known = [count for variant, count in counts.items() if variant.finished]
    is_counted = bool(unit) and None not in known
    values = {
        variant: (count / unit if count and unit else None)
        if is_counted
        else _times_length(passes_per_step(variant.config) if variant.config else None, variant, plain)
        for variant, count in counts.items()
    }
    name = optimizer_name(plain.optimizer) if plain is not None else "a plain step"
    how = "counted in forward and backward passes, masks included" if is_counted else "the passes of a step"
    return VariantCosts(
        column=f"passes / {name}",
        axis=f"forward-backward passes / {name}’s",
        explanation=f"Cost is {how}, not time: these runs were not measured together.",
        unit=f"× {name}’s passes",
        values=values,
    )


def _times_length(cost: Number, variant: Variant, plain: Variant | None) -> Number:
    """The cost of a step or an epoch as that of the whole run: twice the epochs cost twice as much."""
    epochs, unit = (number(one.settings.get("epochs")) if one is not None else None for one in (variant, plain))
    return cost * epochs / unit if cost and epochs and unit else cost


def _passes_per_step(variant: Variant) -> Number:
    counted = variant.values("forward_backwards_per_step")
    return statistics.median(counted) if counted else None
