"""Filters, columns and tensors of which each rank may hold a part: one number per unit is sent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards
from sparsesam.masks.errors import NonFiniteScoreError
from sparsesam.masks.patterns import NM, NMFilters, Structured
from sparsesam.masks.patterns.base import Choice
from sparsesam.masks.select import count_true
from sparsesam.masks.select import random_scores as whole_random_scores
from sparsesam.masks.sharded.base import ShardedPattern, left_after_drop, weight_budget
from sparsesam.masks.sharded.select import Parts, count_kept, random_scores
from sparsesam.masks.units import Unit, fill_greedily, forbid_undefined, spread, unit_count, unit_masks, unit_sums


class _Units:
    """The units of sharded tensors, as vectors that every rank has whole."""

    def __init__(self, unit: Unit, shards: Shards) -> None:
        self.unit, self.shards = unit, shards
        self.counts = {name: unit_count(part.shape, unit) for name, part in shards.parts.items()}
        self.sizes = {name: math.prod(part.shape) // max(1, self.counts[name]) for name, part in shards.parts.items()}

    def index(self, name: str) -> Tensor:
        """The units that this rank holds entries of."""
        part = self.shards.parts[name]
        if self.unit == "tensor" or not part.shape:
            return torch.zeros(1, dtype=torch.int64)
        return part.indices[0 if len(part.shape) == 1 or self.unit == "filter" else 1]

    def gathered(self, parts: Parts) -> dict[str, Tensor]:
        """Sums over ranks of one float64 number per unit that each rank holds a part of."""
        vectors = {name: torch.zeros(count, dtype=torch.float64) for name, count in self.counts.items()}
        for name in self.shards.counted(parts):
            if parts[name].numel():
                vectors[name][self.index(name)] = parts[name].cpu().double()
        summed = self.shards.sum(torch.cat(list(vectors.values())))
        return dict(zip(vectors, summed.split(list(self.counts.values())), strict=True))

    def means(self, scores: Parts) -> dict[str, Tensor]:
        """The mean score of every unit."""
        bad = [name for name, score in scores.items() if bool(score.isnan().any())]
        if self.shards.sum_of(len(bad))[0]:
            raise NonFiniteScoreError(f"scores hold NaN{f' in {bad[0]!r}' if bad else ', on another rank'}")
        sums = {name: unit_sums(s.detach(), self.unit) if s.numel() else s.new_empty(0) for name, s in scores.items()}
        gathered = self.gathered(sums)
        return {name: forbid_undefined(total / max(1, self.sizes[name])) for name, total in gathered.items()}

    def masks(self, masks: Parts) -> dict[str, Tensor]:
        """Which units are kept."""
        kept = {name: mask.double() for name, mask in unit_masks(masks, self.unit).items()}
        return {name: total > 0 for name, total in self.gathered(kept).items()}

    def spread(self, units: Parts, like: Parts) -> dict[str, Tensor]:
        """The part of the masks in which each entry has the value of its unit."""
        own = {name: units[name][self.index(name)] for name in like}
        return spread(own, like, self.unit)


@dataclass(frozen=True)
class StructuredOnShards(ShardedPattern):
    pattern: Structured
    shards: Shards

    @property
    def _units(self) -> _Units:
        return _Units(self.pattern.unit, self.shards)

    def select(self, scores: Parts, sparsity: float | None = None) -> dict[str, Tensor]:
        units = self._units
        budget = weight_budget(self.shards, sparsity)
        return units.spread(fill_greedily(units.means(scores), units.sizes, budget), scores)

    def draw(self, like: Parts, generator: torch.Generator, sparsity: float | None = None) -> dict[str, Tensor]:
        units = self._units
        drawn = whole_random_scores({name: torch.empty(units.counts[name]) for name in like}, generator=generator)
        return units.spread(fill_greedily(drawn, units.sizes, weight_budget(self.shards, sparsity)), like)

    def drop_and_grow(
        self, masks: Parts, keep: Choice, grow: Choice, *, sparsity: float | None = None, ratio: float
    ) -> dict[str, Tensor]:
        units = self._units
        budget, kept = weight_budget(self.shards, sparsity), units.masks(masks)
        left = min(left_after_drop(count_kept(masks, self.shards), ratio), budget)
        survivors = fill_greedily(self._scores(units, keep, kept), units.sizes, left, among=kept)
        free = budget - sum(units.sizes[name] * count_true({name: mask}) for name, mask in survivors.items())
        others = {name: ~mask for name, mask in survivors.items()}
        grown = fill_greedily(self._scores(units, grow, kept), units.sizes, free, among=others)
        return units.spread({name: survivors[name] | grown[name] for name in masks}, masks)

    def _scores(self, units: _Units, choice: Choice, kept: Parts) -> dict[str, Tensor]:
        if isinstance(choice, torch.Generator):
            return whole_random_scores(kept, generator=choice)
        return units.means({name: choice[name] for name in kept})


@dataclass(frozen=True)
class NMFiltersOnShards(ShardedPattern):
    """Filters have one score each, which every rank knows; the rest is `NM` of the scores."""

    pattern: NMFilters
    shards: Shards

    @property
    def _units(self) -> _Units:
        return _Units("filter", self.shards)

    def select(self, scores: Parts, sparsity: float | None = None) -> dict[str, Tensor]:
        units = self._units
        return self._spread(units, self._inner.select(self._rows(units.means(scores))), scores)

    def draw(self, like: Parts, generator: torch.Generator, sparsity: float | None = None) -> dict[str, Tensor]:
        return self.select(random_scores(like, self.shards, generator))

    def drop_and_grow(
        self, masks: Parts, keep: Choice, grow: Choice, *, sparsity: float | None = None, ratio: float
    ) -> dict[str, Tensor]:
        units = self._units
        choices: list[Choice] = [
            choice if isinstance(choice, torch.Generator) else self._rows(units.means(choice))
            for choice in (keep, grow)
        ]
        return self._spread(
            units, self._inner.drop_and_grow(self._rows(units.masks(masks)), *choices, ratio=ratio), masks
        )

    @property
    def _inner(self) -> NM:
        one = self.pattern
        return NM(one.n, one.m, remainder=one.remainder, vectors=one.vectors)

    def _rows(self, units: Parts) -> dict[str, Tensor]:
        """(O,) -> (O, 1) for what are filters of matrices."""
        is_matrix = {name: len(part.shape) >= 2 for name, part in self.shards.parts.items()}
        return {name: unit[:, None] if is_matrix[name] else unit for name, unit in units.items()}

    def _spread(self, units: _Units, rows: Parts, like: Parts) -> dict[str, Tensor]:
        return units.spread({name: row.reshape(-1) for name, row in rows.items()}, like)
