"""Chooses the units with the largest total score that fit into a budget, trying every layer as the frontier.

Measured (python -m benchmarks.budget): whole tensors are chosen ten times faster than by scipy.optimize.milp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsesam.budget.costs import Floats, LayerCosts
from sparsesam.utils.checks import NonFiniteScoreError

BudgetUnit = Literal["tensor", "filter"]
Places = npt.NDArray[np.intp]

#: With more undominated choices than this, those of nearly equal cost are dropped.
_STATES = 1 << 14


@dataclass(frozen=True)
class FrontierOption:
    """A frontier, the earliest perturbed layer: what is always perturbed, its cost, and what can be added."""

    free: tuple[str, ...]  # normalization parameters and biases behind the frontier
    fixed: float
    items: Mapping[str, Floats]  # by weight tensor: the added cost of perturbing 0, 1, 2, … of its units

    @property
    def cheapest(self) -> float:
        return min(float(costs[1:].min()) for costs in self.items.values())

    @property
    def least(self) -> float:
        return self.fixed if self.free else self.fixed + self.cheapest


def frontier_options(costs: LayerCosts, shapes: Mapping[str, torch.Size], unit: BudgetUnit) -> Iterator[FrontierOption]:
    """Yield an option for each frontier, from the last layer to the first.

    An item is charged the cost that it adds to the passes of the frontier. If two items cause the same calls to run
    again, both are charged for them, so a choice never costs more than its charge, and less only with parallel
    branches.
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
    """Returns the number of filters if they can be computed separately; otherwise 1, the tensor itself."""
    return costs.shapes[name][0] if unit == "filter" and costs.can_slice(name) else 1


def _unit_costs(costs: LayerCosts, name: str, unit: BudgetUnit) -> Floats:
    """Returns the cost of the weight gradient and of moving the weights of 1, 2, … units."""
    count = unit_count(costs, name, unit)
    return np.array([costs.perturbing(name, k / count) for k in range(1, count + 1)])


def unit_sums(scores: Mapping[str, Tensor], counts: Mapping[str, int]) -> dict[str, Floats]:
    """Returns the score of each unit: the sum over its weights."""
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
    """Returns the units to perturb, by parameter, for the frontier with the largest total score."""
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
    """Returns how many units of each tensor to take: the best whole tensors or, if their score is larger, filters."""
    chosen = best_subset([float(v[-1]) for v in values], [float(c[-1]) for c in costs], left)
    whole = [len(c) - 1 if place in chosen else 0 for place, c in enumerate(costs)]
    if all(len(c) == 2 for c in costs):
        return whole
    parts = best_prefixes(values, costs, left)
    return max(whole, parts, key=lambda taken: sum(float(v[k]) for v, k in zip(values, taken, strict=True)))


def unit_masks(
    chosen: Mapping[str, list[int]], parameters: Mapping[str, Tensor], counts: Mapping[str, int]
) -> dict[str, Tensor]:
    """Returns masks in which the chosen units are True."""
    masks = {}
    for name, parameter in parameters.items():
        mask = torch.zeros(parameter.shape, dtype=torch.bool, device=parameter.device)
        mask.view(counts[name], -1)[chosen.get(name, [])] = True
        masks[name] = mask
    return masks


# ---- knapsack: whole items, or the first few entries of each of several lists ------------------------------------


def best_subset(values: Sequence[float], costs: Sequence[float], capacity: float) -> list[int]:
    """Returns the items of largest total value whose total cost is at most the capacity: the 0/1 knapsack.

    Grows the list of undominated (cost, value) pairs item by item (Nemhauser and Ullmann, 1969), which is exact;
    if the list exceeds 16384 pairs, only the best pair in each 16384th part of the capacity is kept.
    """
    cost, value = np.zeros(1), np.zeros(1)
    history: list[Places] = []  # origin of each pair: 2 * the previous pair, + 1 if the item was added
    for item_value, item_cost in zip(values, costs, strict=True):
        origin = np.concatenate([2 * np.arange(len(cost)), 2 * np.arange(len(cost)) + 1])
        cost, value = np.concatenate([cost, cost + item_cost]), np.concatenate([value, value + item_value])
        keep = _undominated(cost, value, capacity)
        cost, value = cost[keep], value[keep]
        history.append(origin[keep])
    place, chosen = len(value) - 1, []
    for item in reversed(range(len(history))):
        before = int(history[item][place])
        place = before // 2
        if before % 2:
            chosen.append(item)
    return chosen[::-1]


def _undominated(cost: Floats, value: Floats, capacity: float) -> Places:
    """Returns, by increasing cost, the pairs that fit and have a larger value than every cheaper pair."""
    order: Places = np.lexsort((-value, cost))
    order = order[cost[order] <= capacity]
    best = np.maximum.accumulate(value[order])
    order = order[np.concatenate([[True], best[1:] > best[:-1]])]
    if len(order) > _STATES:
        cell = np.floor(cost[order] * (_STATES / capacity))
        order = order[np.concatenate([cell[1:] != cell[:-1], [True]])]
    return order


def best_prefixes(values: Sequence[Floats], costs: Sequence[Floats], capacity: float) -> list[int]:
    """Returns how many of the first entries of each list to take; ``values[l][k]``, ``costs[l][k]`` are of k entries.

    For a price p per unit of cost, the best k of each list maximizes values[l][k] - p * costs[l][k]: the units of
    largest score per cost, including a list's fixed cost. The choice at the lowest price that fits is optimal for the
    capacity it uses; the rest of the capacity is filled greedily by the largest gain.
    """
    if not values:
        return []
    longest = max(len(one) for one in values)
    value = np.stack([np.pad(one, (0, longest - len(one))) for one in values])
    cost = np.stack([np.pad(one, (0, longest - len(one)), constant_values=np.inf) for one in costs])
    lists = np.arange(len(values))

    def at(price: float) -> Places:
        best: Places = np.argmax(value - price * cost, axis=1)
        return best

    def fits(taken: Places) -> bool:
        return bool(cost[lists, taken].sum() <= capacity)

    density = np.divide(value, cost, out=np.zeros_like(value), where=cost > 0)
    low, high = 0.0, 2 * float(density.max()) or 1.0
    taken = at(high)
    for _ in range(60):
        price = (low + high) / 2
        choice = at(price)
        if fits(choice):
            high, taken = price, choice
        else:
            low = price
    while True:
        left = capacity - cost[lists, taken].sum()
        gain = value - value[lists, taken][:, None]
        gain[cost - cost[lists, taken][:, None] > left] = 0.0
        one, many = np.unravel_index(int(np.argmax(gain)), gain.shape)
        if gain[one, many] <= 0:
            return [int(k) for k in taken]
        taken[one] = many
