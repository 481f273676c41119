"""Whole tensors, filters or columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards
from sparsesam.masks.checks import check_choice
from sparsesam.masks.patterns.base import Choice, Pattern, left_after_drop, weight_budget
from sparsesam.masks.select import Tensors, count_true, random_scores
from sparsesam.masks.units import Unit, Units, fill_greedily


@dataclass(frozen=True)
class Structured(Pattern):
    """Whole units: ``"tensor"``, ``"filter"`` (index along dim 0) or ``"column"`` (index along dim 1).

    A unit's score is the mean of its weights' scores. Units are taken by falling score while they fit into
    round((1 - sparsity) * d) weights, so the number kept is at most the budget and no further unit would fit.
    Each entry of a 1-D tensor is its own filter and column; a 0-D tensor is one unit.

    `drop_and_grow` keeps, of the kept units, what fits into kept - N_drop weights by ``keep``: at least
    N_drop weights are dropped. Random growth draws once per unit.
    """

    unit: Unit = "filter"
    knows_shards = True

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, get_args(Unit))

    def _choose(self, choice: Choice, like: Tensors, sparsity: float | None, shards: Shards) -> dict[str, Tensor]:
        units, budget = Units(self.unit, shards), weight_budget(shards, sparsity, self)
        return units.expand(fill_greedily(_scores(units, choice), units.sizes, budget), like)

    def _drop_and_grow(
        self, masks: Tensors, keep: Choice, grow: Choice, sparsity: float | None, ratio: float, shards: Shards
    ) -> dict[str, Tensor]:
        units, budget = Units(self.unit, shards), weight_budget(shards, sparsity, self)
        kept = units.kept(masks)
        left = min(left_after_drop(count_true(masks, shards), ratio), budget)
        survivors = fill_greedily(_scores(units, keep), units.sizes, left, among=kept)
        free = budget - sum(units.sizes[name] * int(mask.sum()) for name, mask in survivors.items())
        others = {name: ~mask for name, mask in survivors.items()}
        grown = fill_greedily(_scores(units, grow), units.sizes, free, among=others)
        return units.expand({name: survivors[name] | grown[name] for name in masks}, masks)


def _scores(units: Units, choice: Choice) -> dict[str, Tensor]:
    if isinstance(choice, torch.Generator):
        return random_scores({name: torch.empty(count) for name, count in units.counts.items()}, generator=choice)
    return units.means(choice)
