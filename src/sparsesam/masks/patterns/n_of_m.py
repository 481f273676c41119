"""The pattern that keeps N of every M consecutive weights, or filters.

The edge of a shard may cut a group: FSDP2 shards dimension 0, along which the groups of axis="output" run. The scores
of such a tensor are gathered on all ranks; in all other tensors, each rank chooses locally.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from sparsesam.distributed.shards import ShardLayout, Shards
from sparsesam.masks.patterns.base import Pattern
from sparsesam.masks.patterns.structured import Units
from sparsesam.masks.select import BoolMasks, Tensors, Unit, check_scores
from sparsesam.utils.checks import check_choice, check_count

GroupAxis = Literal["output", "input", "filters"]


@dataclass(frozen=True)
class NM(Pattern):
    """Keeps ``n`` of every ``m`` consecutive entries of the im2col matrix (O, C * kh * kw), or of its rows.

    Args:
        n: entries kept in each group.
        m: entries of a group.
        axis: groups run along ``"output"``, O, the dimension contracted in dX = dY · W, or ``"input"``, C * kh * kw.
            ``"filters"``: n of every m consecutive filters are kept, by mean score: whole rows, which dense kernels
            can skip.

    A last group with fewer than m entries and tensors with fewer than two dimensions are kept whole. `drop_and_grow`
    drops N_drop = round(ratio * kept) of the kept entries (or filters) in full groups, over all tensors together, and
    refills every group to n.
    """

    n: int
    m: int
    axis: GroupAxis = "output"

    def __post_init__(self) -> None:
        check_count("m", self.m, "it is the size of a group, 4 in 2:4")
        check_count("n", self.n, "it is the number kept in a group, 2 in 2:4", least=0)
        if self.n > self.m:
            raise ValueError(
                f"n must be between 0 and m={self.m}, got {self.n}; n of every m consecutive entries are kept"
            )
        check_choice("axis", self.axis, get_args(GroupAxis))

    @property
    def implied_sparsity(self) -> float:
        """1 - n / m."""
        return 1 - self.n / self.m

    @property
    def _drawn_by(self) -> Unit | None:
        return "filter" if self.axis == "filters" else None

    def _grow(self, scores: Tensors, first: Tensors | None, sparsity: float, shards: Shards) -> BoolMasks:
        if self.axis == "filters":
            units = Units("filter", shards)
            rows, kept = _rows(units, units.scores(scores)), None if first is None else _rows(units, units.kept(first))
            return units.expand(self._of_rows._grow(rows, kept, sparsity, Shards.whole(rows)), scores)
        check_scores(scores, shards)
        groups = self._groups(shards)
        masks = dict(first or _outside_groups({name: s > -math.inf for name, s in scores.items()}, groups))
        for name, group in groups.items():
            score, certain = group.of(scores[name].detach()), group.of(masks[name])
            if group.is_cut:
                score, certain = shards.gathered(score, group.layout), shards.gathered(certain, group.layout) > 0
            chosen = choose_in_groups(score, certain, self.n, self.m, self.axis)
            group.of(masks[name]).copy_(group.layout.of(chosen) if group.is_cut else chosen)
        return masks

    def _drop(self, keep: Tensors, masks: Tensors, sparsity: float, ratio: float, shards: Shards) -> BoolMasks:
        if self.axis == "filters":
            units = Units("filter", shards)
            rows, kept = _rows(units, units.scores(keep)), _rows(units, units.kept(masks))
            return units.expand(self._of_rows._drop(rows, kept, sparsity, ratio, Shards.whole(rows)), masks)
        outside = _outside_groups(masks, self._groups(shards))  # fixed by the pattern, never dropped
        inside = {name: mask & ~outside[name] for name, mask in masks.items()}
        left = super()._drop(keep, inside, sparsity, ratio, shards)
        return {name: mask | left[name] for name, mask in outside.items()}

    @property
    def _of_rows(self) -> NM:
        """Returns the pattern of matrices (O, 1) with an entry for each filter, which every rank holds as a whole."""
        return replace(self, axis="output")

    def _groups(self, shards: Shards) -> dict[str, _Groups]:
        """Returns the groups of the tensors that have any, by name."""
        axis = 0 if self.axis == "output" else 1
        inside: dict[str, ShardLayout] = {}
        for name, part in shards.parts.items():
            if len(part.shape) < 2 or not part.shape.numel():
                continue
            matrix = part.as_matrix()
            rows, columns = matrix.shape
            rest = matrix.shape[axis] % self.m
            inside[name] = matrix.first((rows - rest, columns) if axis == 0 else (rows, columns - rest))
        held = [(layout.indices[axis] // self.m).bincount() for layout in inside.values()]  # of each group
        cut = shards.sum_of(*(int(counts.remainder(self.m).any()) for counts in held)) if held else []
        return {name: _Groups(layout, is_cut > 0) for (name, layout), is_cut in zip(inside.items(), cut, strict=True)}


@dataclass(frozen=True)
class _Groups:
    """The part of a matrix that divides into groups: this rank's layout of it, and whether shards cut a group."""

    layout: ShardLayout
    is_cut: bool

    def of(self, tensor: Tensor) -> Tensor:
        """Returns a view of the entries in groups that this rank holds, of the im2col matrix (O, C * kh * kw)."""
        rows, columns = self.layout.indices
        return tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))[: len(rows), : len(columns)]


def _outside_groups(masks: Tensors, groups: Mapping[str, _Groups]) -> BoolMasks:
    """Returns contiguous copies of the masks, cleared in groups."""
    outside = {name: mask.clone(memory_format=torch.contiguous_format) for name, mask in masks.items()}
    for name, group in groups.items():
        group.of(outside[name]).fill_(False)
    return outside


def _rows(units: Units, values: Tensor) -> dict[str, Tensor]:
    """Returns one number per filter, (O, 1) for tensors with two or more dimensions, so that a filter is a row."""
    parts = units.shards.parts
    return {name: v[:, None] if len(parts[name].shape) >= 2 else v for name, v in units.by_tensor(values).items()}


def choose_in_groups(scores: Tensor, first: Tensor, n: int, m: int, axis: GroupAxis) -> Tensor:
    """Mark the ``n`` largest of every ``m`` consecutive scores; ties go to the earlier position.

    ``scores`` and ``first`` are matrices (O, K) that divide into groups along ``axis``. Entries of ``first`` are chosen
    before the others and count towards ``n``; -inf is never chosen.
    """
    chosen = torch.zeros_like(first)
    if scores.numel():
        kept = _members(first, m, axis)
        # Kept entries rank last, and lower the number still needed.
        members = _members(scores, m, axis).masked_fill(kept, -math.inf)
        needed = n - kept.sum(0).clamp(max=n)
        _members(chosen, m, axis).copy_((_ranks(members) < needed) & (members > -math.inf) | kept)
    return chosen


def _ranks(members: Tensor) -> Tensor:
    """rank_i = #{j: s_j > s_i} + #{j < i: s_j = s_i}, from one comparison per pair."""
    ranks = torch.zeros_like(members, dtype=torch.int32)
    for j in range(len(members)):
        for i in range(j):
            earlier_wins = members[i] >= members[j]
            ranks[j] += earlier_wins
            ranks[i] += ~earlier_wins
    return ranks


def _members(matrix: Tensor, m: int, axis: GroupAxis) -> Tensor:
    """Returns a view (m, ...): the first members of all groups, the second members, and so on."""
    dim = 0 if axis == "output" else 1
    grouped: Tensor = matrix.unflatten(dim, (-1, m))
    return grouped.movedim(dim + 1, 0)
