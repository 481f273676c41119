"""What each variant costs: measured time where it can be compared, else a count that always can."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsesam.lab.display import Number, ratio
from sparsesam.lab.experiment.calibration import SweepCalibration
from sparsesam.lab.report.variants import Task, Variant, optimizer_name


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
    plain = next((variant for variant in finished if variant.config.is_plain), None)
    name = optimizer_name(plain.config.optimizer) if plain is not None else "a plain step"
    for calibration in calibrations:
        if plain is not None and all(calibration.of(variant.config) for variant in finished):
            cpu = calibration.origin.get("cpu")
            where = f" on {cpu}" if cpu else ""
            seconds = {variant: calibration.seconds_per_epoch(variant.config) for variant in task.variants}
            return VariantCosts(
                column=f"time / {name}",
                axis=f"time of a run / {name}’s",
                explanation=f"Cost is time, masks included: all variants were measured together, in turns{where}.",
                unit=f"× {name}’s time",
                values=_relative(seconds, plain),
            )
    return VariantCosts(
        column=f"passes / {name}",
        axis=f"forward-backward passes / {name}’s",
        explanation="Cost is counted in forward and backward passes, masks included, not time: these runs were not "
        "measured together.",
        unit=f"× {name}’s passes",
        values=_relative({variant: _passes(variant) for variant in task.variants}, plain),
    )


def _relative(costs: Mapping[Variant, Number], plain: Variant | None) -> dict[Variant, Number]:
    """The costs of an epoch or a step as those of whole runs, in units of the plain variant's."""
    if plain is None:
        return dict(costs)
    whole = {variant: cost and cost * variant.config.epochs for variant, cost in costs.items()}
    unit = whole[plain]
    return {variant: cost / unit if cost and unit else None for variant, cost in whole.items()}


def _passes(variant: Variant) -> Number:
    counted = variant.values("forward_backwards_per_step")
    return statistics.median(counted) if counted else None
