"""Any weights of sharded tensors: thresholds are found by counting."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards
from sparsesam.masks.patterns.base import Choice
from sparsesam.masks.sharded.base import ShardedPattern, best, left_after_drop, weight_budget
from sparsesam.masks.sharded.select import Parts, count_kept, random_mask, top_mask


@dataclass(frozen=True)
class UnstructuredOnShards(ShardedPattern):
    shards: Shards

    def select(self, scores: Parts, sparsity: float | None = None) -> dict[str, Tensor]:
        return top_mask(scores, weight_budget(self.shards, sparsity), self.shards)

    def draw(self, like: Parts, generator: torch.Generator, sparsity: float | None = None) -> dict[str, Tensor]:
        return random_mask(like, weight_budget(self.shards, sparsity), self.shards, generator=generator)

    def drop_and_grow(
        self, masks: Parts, keep: Choice, grow: Choice, *, sparsity: float | None = None, ratio: float
    ) -> dict[str, Tensor]:
        budget = weight_budget(self.shards, sparsity)
        left = min(left_after_drop(count_kept(masks, self.shards), ratio), budget)
        survivors = best(masks, left, keep, self.shards, among=masks)
        return best(masks, budget, grow, self.shards, first=survivors)
