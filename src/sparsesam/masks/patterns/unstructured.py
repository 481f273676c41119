"""Any weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsesam.masks.patterns.base import Choice, Pattern, Scores, weight_budget
from sparsesam.masks.select import count_true, random_mask, top_mask


@dataclass(frozen=True)
class Unstructured(Pattern):
    """Any set of weights: the global top-k, with exactly round((1 - sparsity) * d) ones."""

    def select(self, scores: Scores, sparsity: float | None = None) -> dict[str, Tensor]:
        """See :meth:`Pattern.select`."""
        return top_mask(scores, weight_budget(scores, sparsity, self))

    def draw(
        self, like: Mapping[str, Tensor], generator: torch.Generator, sparsity: float | None = None
    ) -> dict[str, Tensor]:
        return random_mask(like, weight_budget(like, sparsity, self), generator=generator)

    def _drop_and_grow(
        self, masks: Mapping[str, Tensor], keep: Choice, grow: Choice, sparsity: float | None, ratio: float
    ) -> dict[str, Tensor]:
        budget = weight_budget(masks, sparsity, self)
        kept = count_true(masks)
        left = min(kept - round(ratio * kept), budget)
        if isinstance(keep, torch.Generator):
            survivors = random_mask(masks, left, generator=keep, among=masks)
        else:
            survivors = top_mask(keep, left, among=masks)
        if isinstance(grow, torch.Generator):
            return random_mask(survivors, budget, generator=grow, first=survivors)
        return top_mask(grow, budget, first=survivors)
