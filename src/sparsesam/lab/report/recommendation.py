"""Which variant to choose: the cheapest one whose accuracy does not differ significantly from the best."""

from __future__ import annotations

from dataclasses import dataclass

from sparsesam.lab.experiment.confidence import differ
from sparsesam.lab.report.cost import VariantCosts
from sparsesam.lab.report.variants import Task, Variant, seed_of


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
    best = max(known, key=_mean)
    equal = [variant for variant in known if variant is best or _is_not_different(variant, best)]
    chosen = min(equal, key=lambda variant: (cost.values[variant], -_mean(variant)))
    return Recommendation(chosen, best, cost)


def _is_not_different(first: Variant, second: Variant) -> bool:
    """False for fewer than three seeds in common, which say too little; then only equal means are equal."""
    accuracies = [_by_seed(variant) for variant in (first, second)]
    if len(accuracies[0].keys() & accuracies[1].keys()) < 3:
        return _mean(first) == _mean(second)
    return not differ(*accuracies)


def _by_seed(variant: Variant) -> dict[int, float]:
    found = {seed_of(run): run.measured("test_accuracy") for run in variant.finished}
    return {seed: accuracy for seed, accuracy in found.items() if seed is not None and accuracy is not None}


def _mean(variant: Variant) -> float:
    assert variant.accuracy is not None
    return variant.accuracy
