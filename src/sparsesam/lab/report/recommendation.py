"""Which variant to choose: the cheapest one that is as accurate as the best, as far as the seeds can tell."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparsesam.lab.display.numbers import percent
from sparsesam.lab.report.cost import Cost
from sparsesam.lab.report.variants import Task, Variant


@dataclass(frozen=True)
class Recommendation:
    """``best`` has the highest mean accuracy; ``chosen`` is the cheapest within one standard error of it."""

    chosen: Variant
    best: Variant
    cost: Cost

    @property
    def sentence(self) -> str:
        text = f"Recommended: {self.chosen.label}, {_accuracy(self.chosen)} at {self.cost.show(self.chosen)}."
        if self.chosen is self.best:
            return f"{text} It has the highest mean accuracy."
        return (
            f"{text} The highest mean is {_accuracy(self.best)}, {self.best.label} at {self.cost.show(self.best)}; "
            "the difference is within one standard error."
        )


def recommend(task: Task, cost: Cost) -> Recommendation | None:
    """None for fewer than two variants with an accuracy and a cost.

    The one-standard-error rule: of all variants whose mean accuracy is at most one standard error of the difference
    below the best, the cheapest; of equally cheap ones, the most accurate.
    """
    known = [variant for variant in task.variants if variant.accuracy is not None and cost.values[variant] is not None]
    if len(known) < 2:
        return None
    best = max(known, key=_mean)
    equal = [variant for variant in known if _mean(best) - _mean(variant) <= _standard_error(best, variant)]
    chosen = min(equal, key=lambda variant: (cost.values[variant], -_mean(variant)))
    return Recommendation(chosen, best, cost)


def _mean(variant: Variant) -> float:
    assert variant.accuracy is not None
    return variant.accuracy


def _standard_error(first: Variant, second: Variant) -> float:
    """Of the difference of the means; 0 if one has a single seed, which says nothing about its error."""
    errors = [one.standard_error("test_accuracy") for one in (first, second)]
    return 0.0 if None in errors else math.hypot(*(one for one in errors if one is not None))


def _accuracy(variant: Variant) -> str:
    return percent(variant.accuracy, variant.deviation("test_accuracy"))
