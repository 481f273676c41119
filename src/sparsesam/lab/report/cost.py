"""What each variant costs, measured time where it can be compared, else passes; and which variant to choose."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sparsesam.lab.display import Number, ratio
from sparsesam.lab.display.figure import OPTIMIZERS
from sparsesam.lab.experiment.calibration import SweepCalibration
from sparsesam.lab.experiment.confidence import differ
from sparsesam.lab.report.variants import Task, Variant


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
    name = OPTIMIZERS[plain.config.optimizer][0] if plain is not None else "a plain step"
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


@dataclass(frozen=True)
class Recommendation:
    """``best`` has the highest mean accuracy; ``chosen`` is the cheapest without a significant difference."""

    chosen: Variant
    best: Variant
    cost: VariantCosts

    @property
    def sentence(self) -> str:
        text = f"Best choice: {self.chosen.label}, {self.chosen.accuracy_text} at {self.cost.show(self.chosen)}."
        if self.chosen is self.best:
            return f"{text} It has the highest mean accuracy."
        return (
            f"{text} The highest mean is {self.best.accuracy_text}, {self.best.label} at {self.cost.show(self.best)}; "
            "the difference is not significant."
        )


def recommend(task: Task, cost: VariantCosts) -> Recommendation | None:
    """None for fewer than two variants with an accuracy and a cost.

    Of all variants whose accuracy does not differ significantly from the highest mean, the cheapest; of equally cheap
    ones, the most accurate. A difference is significant if its 95 % interval, seed by seed, excludes 0.
    """
    known = [variant for variant in task.variants if variant.accuracy is not None and cost.values[variant] is not None]
    if len(known) < 2:
        return None
    best = max(known, key=lambda variant: variant.accuracy or 0.0)
    equal = [variant for variant in known if variant is best or _is_not_different(variant, best)]
    chosen = min(equal, key=lambda variant: (cost.values[variant], -(variant.accuracy or 0.0)))
    return Recommendation(chosen, best, cost)


def _is_not_different(first: Variant, second: Variant) -> bool:
    """False for fewer than three seeds in common, which say too little; then only equal means are equal."""
    ours, theirs = first.by_seed("test_accuracy"), second.by_seed("test_accuracy")
    return not differ(ours, theirs) if len(ours.keys() & theirs.keys()) > 2 else first.accuracy == second.accuracy
