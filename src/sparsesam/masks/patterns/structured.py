"""Whole tensors, filters or columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from sparsesam.masks.patterns.base import Choice, Pattern, Scores, check_choice, weight_budget
from sparsesam.masks.select import count_true, random_scores
from sparsesam.masks.units import Unit, fill_greedily, spread, unit_count, unit_masks, unit_scores


@dataclass(frozen=True)
class Structured(Pattern):
    """Whole units: ``"tensor"``, ``"filter"`` (index along dim 0) or ``"column"`` (index along dim 1).

    A unit's score is the mean of its weights' scores. Units are taken by falling score while they fit into
    round((1 - sparsity) * d) weights, so the number kept is at most the budget and no further unit would fit.
    Each entry of a 1-D tensor is its own filter and column; a 0-D tensor is one unit.

    :meth:`drop_and_grow` keeps, of the kept units, what fits into kept - N_drop weights by ``keep``: at least
    N_drop weights are dropped. Random growth draws once per unit.
    """

    unit: Unit = "filter"

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, get_args(Unit))

    def select(self, scores: Scores, sparsity: float | None = None) -> dict[str, Tensor]:
        """See :meth:`Pattern.select`."""
        return self._fill(unit_scores(scores, self.unit), scores, sparsity)

    def draw(
        self, like: Mapping[str, Tensor], generator: torch.Generator, sparsity: float | None = None
    ) -> dict[str, Tensor]:
        units = unit_masks({name: torch.zeros_like(t, dtype=torch.bool) for name, t in like.items()}, self.unit)
        return self._fill(random_scores(units, generator=generator), like, sparsity)

    def _drop_and_grow(
        self, masks: Mapping[str, Tensor], keep: Choice, grow: Choice, sparsity: float | None, ratio: float
    ) -> dict[str, Tensor]:
        budget, kept, sizes = weight_budget(masks, sparsity, self), count_true(masks), self._sizes(masks)
        units = unit_masks(masks, self.unit)
        left = min(kept - round(ratio * kept), budget)
        survivors = fill_greedily(self._unit_scores(keep, units), sizes, left, among=units)
        others = {name: ~mask for name, mask in survivors.items()}
        free = budget - sum(sizes[name] * count_true({name: mask}) for name, mask in survivors.items())
        grown = fill_greedily(self._unit_scores(grow, units), sizes, free, among=others)
        return self._spread({name: survivors[name] | grown[name] for name in masks}, masks)

    def _fill(
        self, units: Mapping[str, Tensor], like: Mapping[str, Tensor], sparsity: float | None
    ) -> dict[str, Tensor]:
        chosen = fill_greedily(units, self._sizes(like), weight_budget(like, sparsity, self))
        return self._spread(chosen, like)

    def _unit_scores(self, choice: Choice, units: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if isinstance(choice, torch.Generator):
            return random_scores(units, generator=choice)
        return unit_scores({name: choice[name] for name in units}, self.unit)

    def _sizes(self, like: Mapping[str, Tensor]) -> dict[str, int]:
        return {name: tensor.numel() // max(1, unit_count(tensor.shape, self.unit)) for name, tensor in like.items()}

    def _spread(self, units: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return spread(units, like, self.unit)
