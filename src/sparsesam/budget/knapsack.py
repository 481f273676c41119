"""Choose what is worth most among what fits: whole items, or the first few of each of several lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]

#: Beyond so many undominated choices, those of nearly equal cost are dropped.
_STATES = 1 << 14


def best_subset(values: Sequence[float], costs: Sequence[float], capacity: float) -> list[int]:
    """The items of greatest total value whose total cost is at most the capacity: the 0/1 knapsack.

    Grows the list of undominated (cost, value) pairs item by item (Nemhauser and Ullmann, 1969), which is exact;
    should the list pass 16384 pairs, only the best of each 16384th part of the capacity is kept.
    """
    cost, value = np.zeros(1), np.zeros(1)
    history: list[Places] = []  # where each pair came from: 2 * the pair before, + 1 with the item
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
    """By rising cost, the pairs that fit and are worth more than every cheaper one."""
    order: Places = np.lexsort((-value, cost))
    order = order[cost[order] <= capacity]
    best = np.maximum.accumulate(value[order])
    order = order[np.concatenate([[True], best[1:] > best[:-1]])]
    if len(order) > _STATES:
        cell = np.floor(cost[order] * (_STATES / capacity))
        order = order[np.concatenate([cell[1:] != cell[:-1], [True]])]
    return order


def best_prefixes(values: Sequence[Floats], costs: Sequence[Floats], capacity: float) -> list[int]:
    """How many of the first entries to take of each list; ``values[l][k]`` and ``costs[l][k]`` are those of k entries.

    For a price p per unit of cost, each list is best off with the k that maximizes values[l][k] - p * costs[l][k]:
    the units of the most score per cost, a list's fixed cost included. The lowest price whose choice fits is
    optimal for what it spends; what is left over is filled by what gains most.
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
