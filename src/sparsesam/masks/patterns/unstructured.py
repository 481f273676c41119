"""Any weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards
from sparsesam.masks.patterns.base import Choice, Pattern, left_after_drop, weight_budget
from sparsesam.masks.select import Tensors, count_true, random_scores, top_mask


@dataclass(frozen=True)
class Unstructured(Pattern):
    """Any set of weights: the global top-k, with exactly round((1 - sparsity) * d) ones."""

    knows_shards = True

    def select(
        self, scores: Tensors, sparsity: float | None = None, *, shards: Shards | None = None
    ) -> dict[str, Tensor]:
        """See `Pattern.select`."""
        shards = shards or Shards.whole(scores)
        return top_mask(scores, weight_budget(shards, sparsity, self), shards=shards)

    def _drop_and_grow(
        self, masks: Tensors, keep: Choice, grow: Choice, sparsity: float | None, ratio: float, shards: Shards
    ) -> dict[str, Tensor]:
        budget = weight_budget(shards, sparsity, self)
        left = min(left_after_drop(count_true(masks, shards), ratio), budget)
        keep, grow = (
            random_scores(masks, generator=choice, shards=shards) if isinstance(choice, torch.Generator) else choice
            for choice in (keep, grow)
        )
        survivors = top_mask(keep, left, among=masks, shards=shards)
        return top_mask(grow, budget, first=survivors, shards=shards)
