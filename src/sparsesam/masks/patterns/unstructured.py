"""Any weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparsesam.distributed.shards import Shards
from sparsesam.masks.patterns.base import Choice, Pattern, left_after_drop, scores_of, weight_budget
from sparsesam.masks.select import Tensors, count_true, top_mask


@dataclass(frozen=True)
class Unstructured(Pattern):
    """Any set of weights: the global top-k, with exactly round((1 - sparsity) * d) ones."""

    knows_shards = True

    def _choose(self, choice: Choice, like: Tensors, sparsity: float | None, shards: Shards) -> dict[str, Tensor]:
        return top_mask(scores_of(choice, like, shards), weight_budget(shards, sparsity, self), shards=shards)

    def _drop_and_grow(
        self, masks: Tensors, keep: Choice, grow: Choice, sparsity: float | None, ratio: float, shards: Shards
    ) -> dict[str, Tensor]:
        budget = weight_budget(shards, sparsity, self)
        left = min(left_after_drop(count_true(masks, shards), ratio), budget)
        survivors = top_mask(scores_of(keep, masks, shards), left, among=masks, shards=shards)
        return top_mask(scores_of(grow, masks, shards), budget, first=survivors, shards=shards)
