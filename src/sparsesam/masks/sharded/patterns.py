"""Patterns of tensors of which each rank holds a part: the same masks as of the whole tensors.

A pattern from here takes and returns parts. Of single weights, only counts are sent (`threshold`); of filters and other
units, one number each (`units`); of N:M, the groups that the edge of a shard cuts (`nm`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards
from sparsesam.masks.patterns import NM, NMFilters, Pattern, PerLayer, Structured, Unstructured
from sparsesam.masks.patterns.base import Choice
from sparsesam.masks.sharded.base import ShardedPattern
from sparsesam.masks.sharded.nm import NMOnShards
from sparsesam.masks.sharded.select import Parts
from sparsesam.masks.sharded.units import NMFiltersOnShards, StructuredOnShards
from sparsesam.masks.sharded.unstructured import UnstructuredOnShards


def on_shards(pattern: Pattern, shards: Shards | None) -> Pattern | ShardedPattern:
    """The pattern itself where nothing is sharded."""
    if shards is None:
        return pattern
    if isinstance(pattern, PerLayer):
        return _PerLayerOnShards(pattern, shards)
    if isinstance(pattern, Unstructured):
        return UnstructuredOnShards(shards)
    if isinstance(pattern, Structured):
        return StructuredOnShards(pattern, shards)
    if isinstance(pattern, NM):
        return NMOnShards(pattern, shards)
    if isinstance(pattern, NMFilters):
        return NMFiltersOnShards(pattern, shards)
    raise ValueError(
        f"pattern must be one of sparsesam's own with sharded parameters, got {pattern}; it would see parts of tensors"
    )


@dataclass(frozen=True)
class _PerLayerOnShards(ShardedPattern):
    pattern: PerLayer
    shards: Shards

    def _inner(self, name: str) -> Pattern | ShardedPattern:
        return on_shards(self.pattern.inner, self.shards.only(name))

    def select(self, scores: Parts, sparsity: float | None = None) -> dict[str, Tensor]:
        masks: dict[str, Tensor] = {}
        for name, score in scores.items():
            masks |= self._inner(name).select({name: score}, sparsity)
        return masks

    def draw(self, like: Parts, generator: torch.Generator, sparsity: float | None = None) -> dict[str, Tensor]:
        masks: dict[str, Tensor] = {}
        for name, tensor in like.items():
            masks |= self._inner(name).draw({name: tensor}, generator, sparsity)
        return masks

    def drop_and_grow(
        self, masks: Parts, keep: Choice, grow: Choice, *, sparsity: float | None = None, ratio: float
    ) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        for name, mask in masks.items():
            own_keep, own_grow = (c if isinstance(c, torch.Generator) else {name: c[name]} for c in (keep, grow))
            result |= self._inner(name).drop_and_grow({name: mask}, own_keep, own_grow, sparsity=sparsity, ratio=ratio)
        return result
