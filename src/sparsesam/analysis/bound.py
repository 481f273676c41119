"""The generalization bound of theorem 3, evaluated term by term for a trained model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sparsesam.analysis.objective import Objective, norm, select_parameters
from sparsesam.analysis.results import Measurement
from sparsesam.analysis.sharpness import sharpness
from sparsesam.utils.checks import check_count

_NOTES = (
    "the theorem assumes a loss within [0, 1]; for cross-entropy, which is not bounded, the bound is a heuristic",
    "the maximum is found by gradient ascent and may be too small, which makes the bound too small",
    "the theorem assumes that Gaussian noise on the masked weights does not lower the test loss; this is not checked",
)


@dataclass(frozen=True)
class GeneralizationBound(Measurement):
    """L_D(w) <= max_loss + complexity, with

        complexity = sqrt((dimension_term + confidence_term + remainder) / (n - 1))
        dimension_term  = k log(1 + ||w||² / rho² (1 + sqrt(log n / k))²)
        confidence_term = 4 log(n / delta)
        remainder       = 8 log(6n + 3k), the paper's O(1) as its proof has it

    ``vacuous``: the bound is at least ``threshold``, so a uniform prediction does as well. ``threshold`` is 1 for a
    loss within [0, 1] and log C for the cross-entropy of C classes.
    """

    bound: float
    max_loss: float
    complexity: float
    dimension_term: float
    confidence_term: float
    remainder: float
    threshold: float
    vacuous: bool
    squared_norm: float
    k: int
    n: int


def generalization_bound(
    objective: Objective,
    rho: float = 0.05,
    *,
    n: int | None = None,
    delta: float = 0.05,
    classes: int | None = None,
    **ascent: Any,
) -> GeneralizationBound:
    """Evaluate theorem 3 at the model's weights, with max_loss found by `sharpness` and its arguments ``ascent``.

    ``n`` is the size of the training set, by default the number of samples of the objective. Without ``classes`` the
    loss is assumed to be in [0, 1].
    """
    chosen = select_parameters(objective.model)
    k, squared_norm = sum(p.numel() for p in chosen.values()), norm(chosen.values()) ** 2
    n = objective.samples if n is None else n
    check_count("n", n, "n is the number of training samples", least=2)
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta}; the bound holds with probability 1 - delta")
    measured = sharpness(objective, rho, **ascent)
    terms = (
        k * math.log1p(squared_norm / rho**2 * (1 + math.sqrt(math.log(n) / k)) ** 2),
        4 * math.log(n / delta),
        8 * math.log(6 * n + 3 * k),
    )
    max_loss, complexity = measured.max_loss, math.sqrt(sum(terms) / (n - 1))
    bound, threshold = max_loss + complexity, 1.0 if classes is None else math.log(classes)
    vacuous, sizes = not bound < threshold, (squared_norm, k, n)
    some = [f"the training loss is measured on {objective.samples} of the {n} samples"] * (objective.samples < n)
    made = objective.measured(*_NOTES, *some)
    return GeneralizationBound(bound, max_loss, complexity, *terms, threshold, vacuous, *sizes, **made)
