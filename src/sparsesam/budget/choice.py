"""The units of the largest score that fit into a budget: every layer is tried as the earliest perturbed one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from sparsesam.budget.costs import LayerCosts
from sparsesam.budget.knapsack import Floats, best_prefixes, best_subset
from sparsesam.masks.checks import NonFiniteScoreError

BudgetUnit = Literal["tensor", "filter"]


@dataclass(frozen=True)
class FrontierOption:
    """One choice of the earliest perturbed layer: what is always perturbed, its cost, and what can be added."""

    free: tuple[str, ...]  # normalization parameters and biases behind the frontier
    fixed: float
    items: Mapping[str, Floats]  # by weight tensor: what perturbing 0, 1, 2, … of its units adds

    @property
    def cheapest(self) -> float:
        return min(float(costs[1:].min()) for costs in self.items.values())

    @property
    def least(self) -> float:
        return self.fixed if self.free else self.fixed + self.cheapest


def frontier_options(costs: LayerCosts, shapes: Mapping[str, torch.Size], unit: BudgetUnit) -> Iterator[FrontierOption]:
    """From the last layer to the first.

    An item is charged what it adds to the frontier's own passes. Two items that make the same calls run again are both
    charged for them, so a choice never costs more than it is charged, and less only where branches run in parallel.
    """
    places = {name: place for name, place in costs.first_use.items() if name in shapes}
    units = {name: _unit_costs(costs, name, unit) for name in places}
    for frontier in sorted(set(places.values()), reverse=True):
        behind = [name for name, place in places.items() if place >= frontier]
        free = tuple(name for name in behind if len(shapes[name]) < 2)
        sources = {*free, *(name for name in behind if places[name] == frontier)}
        passes = costs.passing(sources)
        items = {
            name: np.concatenate([[0.0], units[name] + costs.passing({*sources, name}) - passes])
            for name in behind
            if name not in free
        }
        yield FrontierOption(free, passes + sum(costs.perturbing(name, 1) for name in free), items)


def unit_count(costs: LayerCosts, name: str, unit: BudgetUnit) -> int:
    """The number of filters where they cost less than the whole tensor; else 1, the tensor itself."""
    return costs.shapes[name][0] if unit == "filter" and costs.can_slice(name) else 1


def _unit_costs(costs: LayerCosts, name: str, unit: BudgetUnit) -> Floats:
    """The weight gradient and the moving of 1, 2, … units."""
    count = unit_count(costs, name, unit)
    return np.array([costs.perturbing(name, k / count) for k in range(1, count + 1)])


def unit_sums(scores: Mapping[str, Tensor], counts: Mapping[str, int]) -> dict[str, Floats]:
    """The score of each unit: the sum over its weights."""
    sums = {}
    for name, score in scores.items():
        total = score.detach().reshape(counts[name], -1).sum(1, dtype=torch.float64).cpu().numpy()
        if not np.isfinite(total).all():
            raise NonFiniteScoreError(f"the scores of {name!r} must be finite, got NaN or infinity")
        if (total < 0).any():
            raise ValueError(f"the scores of {name!r} must be at least 0, got {total.min()}; use squares or magnitudes")
        sums[name] = total
    return sums


def best_units(
    options: Sequence[FrontierOption], scores: Mapping[str, Floats], allowance: float
) -> dict[str, list[int]]:
    """The units to perturb, by parameter, of the frontier with the largest total score."""
    best, chosen = -1.0, {}
    for one in options:
        left = allowance - one.fixed
        if left < 0:
            continue
        orders = {name: np.argsort(-scores[name], kind="stable") for name in one.items}
        values = [np.concatenate([[0.0], np.cumsum(scores[name][order])]) for name, order in orders.items()]
        taken = _taken(list(one.items.values()), values, left)
        free = {name: [0] for name in one.free}
        total = sum(float(scores[name][0]) for name in free) + sum(v[k] for v, k in zip(values, taken, strict=True))
        if total > best and (free or any(taken)):
            weights = zip(orders.items(), taken, strict=True)
            best, chosen = total, free | {name: order[:k].tolist() for (name, order), k in weights}
    return chosen


def _taken(costs: Sequence[Floats], values: Sequence[Floats], left: float) -> list[int]:
    """How many units of each tensor: the best whole tensors or, if their score is larger, filters."""
    chosen = best_subset([float(v[-1]) for v in values], [float(c[-1]) for c in costs], left)
    whole = [len(c) - 1 if place in chosen else 0 for place, c in enumerate(costs)]
    if all(len(c) == 2 for c in costs):
        return whole
    parts = best_prefixes(values, costs, left)
    return max(whole, parts, key=lambda taken: sum(float(v[k]) for v, k in zip(values, taken, strict=True)))


def unit_masks(
    chosen: Mapping[str, list[int]], parameters: Mapping[str, Tensor], counts: Mapping[str, int]
) -> dict[str, Tensor]:
    """Masks in which the chosen units are True."""
    masks = {}
    for name, parameter in parameters.items():
        mask = torch.zeros(parameter.shape, dtype=torch.bool, device=parameter.device)
        mask.view(counts[name], -1)[chosen.get(name, [])] = True
        masks[name] = mask
    return masks
