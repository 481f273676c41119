"""What a pattern of parts can do, and what such patterns share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards
from sparsesam.masks.patterns.base import Choice
from sparsesam.masks.sharded.select import Parts, random_mask, random_scores, top_mask


class ShardedPattern(ABC):
    """What a `Pattern` can do, of parts; the arguments were checked by the rule that has the pattern."""

    @abstractmethod
    def select(self, scores: Parts, sparsity: float | None = None) -> dict[str, Tensor]: ...

    @abstractmethod
    def draw(self, like: Parts, generator: torch.Generator, sparsity: float | None = None) -> dict[str, Tensor]: ...

    @abstractmethod
    def drop_and_grow(
        self, masks: Parts, keep: Choice, grow: Choice, *, sparsity: float | None = None, ratio: float
    ) -> dict[str, Tensor]: ...


def weight_budget(shards: Shards, sparsity: float | None) -> int:
    assert sparsity is not None  # check_sparsity refuses it
    return round((1 - sparsity) * shards.total)


def left_after_drop(kept: int, ratio: float) -> int:
    return kept - round(ratio * kept)


def best(
    like: Parts,
    count: int,
    choice: Choice,
    shards: Shards,
    *,
    among: Parts | None = None,
    first: Parts | None = None,
) -> dict[str, Tensor]:
    """By score, or at random."""
    if isinstance(choice, torch.Generator):
        return random_mask(like, count, shards, generator=choice, among=among, first=first)
    return top_mask({name: choice[name] for name in like}, count, shards, among=among, first=first)


def scores_or_draws(like: Parts, choice: Choice, shards: Shards) -> Mapping[str, Tensor]:
    return random_scores(like, shards, choice) if isinstance(choice, torch.Generator) else choice
