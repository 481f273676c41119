"""What each variant costs: measured time where it can be compared, else a count that always can."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sparsesam.lab.display import Number, ratio
from sparsesam.lab.experiment.calibration import SweepCalibration
from sparsesam.lab.report.variants import OPTIMIZERS, Task, Variant


@dataclass(frozen=True)
class VariantCosts:
    """``values`` by variant, in units of ``reference``; ``explanation`` says how they were obtained."""

    measure: Literal["time", "passes"]
    reference: str
    explanation: str
    values: Mapping[Variant, Number]

    @property
    def column(self) -> str:
        return f"{self.measure} / {self.reference}"

    @property
    def axis(self) -> str:
        words = {"time": "time of a run", "passes": "forward-backward passes"}
        return f"{words[self.measure]} / {self.reference}’s"

    def show(self, variant: Variant) -> str:
        return f"{ratio(self.values[variant])} × {self.reference}’s {self.measure}"


def cost_of(task: Task, calibrations: Sequence[SweepCalibration] = ()) -> VariantCosts:
    """Times only if all finished variants of the task were measured together; otherwise forward-backward passes."""
    finished = [variant for variant in task.variants if variant.finished]
    plain = next((variant for variant in finished if variant.config.is_plain), None)
    name = OPTIMIZERS[plain.config.optimizer] if plain is not None else "a plain step"
    for calibration in calibrations:
        if plain is not None and all(calibration.of(variant.config) for variant in finished):
            cpu = calibration.origin.get("cpu")
            explanation = "Cost is time, masks included: all variants were measured together, in turns"
            seconds = {variant: calibration.seconds_per_epoch(variant.config) for variant in task.variants}
            where = f" on {cpu}." if cpu else "."
            return VariantCosts("time", name, explanation + where, _relative(seconds, plain))
    explanation = (
        "Cost is counted in forward and backward passes, masks included, not time: these runs were not measured "
        "together."
    )
    counted = {variant: variant.by_seed("forward_backwards_per_step").values() for variant in task.variants}
    passes = {variant: statistics.median(values) if values else None for variant, values in counted.items()}
    return VariantCosts("passes", name, explanation, _relative(passes, plain))


def _relative(costs: Mapping[Variant, Number], plain: Variant | None) -> dict[Variant, Number]:
    """The costs of an epoch or a step as those of whole runs, in units of the plain variant's."""
    if plain is None:
        return dict(costs)
    whole = {variant: cost and cost * variant.config.epochs for variant, cost in costs.items()}
    unit = whole[plain]
    return {variant: cost / unit if cost and unit else None for variant, cost in whole.items()}
