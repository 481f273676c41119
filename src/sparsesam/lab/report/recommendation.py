"""Which variant to choose: the cheapest one whose accuracy does not differ significantly from the best."""

from __future__ import annotations

from dataclasses import dataclass

from sparsesam.lab.experiment.confidence import differ
from sparsesam.lab.report.cost import VariantCosts
from sparsesam.lab.report.variants import Task, Variant


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
