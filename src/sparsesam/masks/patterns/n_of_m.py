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

from sparsesam.distributed.shards import Shards
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
    def unit(self) -> Unit | None:
        """Filters with ``axis="filters"``."""
        return "filter" if self.axis == "filters" else None

    def _grow(self, scores: Tensors, first: Tensors | None, sparsity: float, shards: Shards) -> BoolMasks:
        if self.axis == "filters":
            units = Units("filter", shards)
            rows = units.by_tensor(units.scores(scores))
            kept = None if first is None else units.by_tensor(units.kept(first))
            return units.expand(self._of_rows._grow(rows, kept, sparsity, Shards.whole(rows)), scores)
        check_scores(scores, shards)
        held, cut = self._groups(shards)
        masks = dict(first or self._outside({name: s > -math.inf for name, s in scores.items()}, held))
        for name in held:
            score, mask = scores[name].detach(), masks[name]
            if name in cut:
                score, mask = shards.gathered(name, score), shards.gathered(name, mask) > 0
            fill_groups(mask.flatten(1), score.flatten(1), self.n, self.m, 0 if self.axis == "output" else 1)
            if name in cut:
                masks[name].copy_(shards.parts[name].of(mask))
        return masks

    def _drop(self, keep: Tensors, masks: Tensors, sparsity: float, ratio: float, shards: Shards) -> BoolMasks:
        if self.axis == "filters":
            units = Units("filter", shards)
            rows, kept = units.by_tensor(units.scores(keep)), units.by_tensor(units.kept(masks))
            return units.expand(self._of_rows._drop(rows, kept, sparsity, ratio, Shards.whole(rows)), masks)
        outside = self._outside(masks, self._groups(shards)[0])  # fixed by the pattern, never dropped
        inside = {name: mask & ~outside[name] for name, mask in masks.items()}
        left = super()._drop(keep, inside, sparsity, ratio, shards)
        return {name: mask | left[name] for name, mask in outside.items()}

    @property
    def _of_rows(self) -> NM:
        """Returns the pattern of matrices (O, 1) with an entry for each filter, which every rank holds as a whole."""
        return replace(self, axis="output")

    def _groups(self, shards: Shards) -> tuple[dict[str, int], set[str]]:
        """Returns how many rows or columns in groups this rank holds, by tensor; and tensors with a group that is cut.

        Tensors without groups are left out.
        """
        held = {}
        for name, part in shards.parts.items():
            if len(part.shape) > 1 and part.shape.numel():
                size, index = part.shape[0], part.indices[0]
                if self.axis != "output":
                    size, index = math.prod(part.shape[1:]), part.columns
                held[name] = index[index < size - size % self.m]
        cut = [int((index // self.m).bincount().remainder(self.m).any()) for index in held.values()]
        cut = shards.sum_of(*cut) if held else []
        names = {name for name, ranks in zip(held, cut, strict=True) if ranks}
        return {name: len(index) for name, index in held.items()}, names

    def _outside(self, masks: Tensors, held: Mapping[str, int]) -> BoolMasks:
        """Returns contiguous copies of the masks, cleared in groups."""
        outside = {name: mask.clone(memory_format=torch.contiguous_format) for name, mask in masks.items()}
        for name, count in held.items():
            outside[name].flatten(1).narrow(0 if self.axis == "output" else 1, 0, count).fill_(False)
        return outside


def fill_groups(mask: Tensor, scores: Tensor, n: int, m: int, axis: int) -> None:
    """Add those of the largest scores to the mask that are missing to ``n`` of every ``m`` consecutive entries.

    ``mask`` and ``scores`` are matrices (O, K), with groups along ``axis``; a remainder is left as it is. Ties go to
    the earlier position; -inf is never chosen.
    """
    kept, members = _members(mask, m, axis), _members(scores, m, axis)
    if kept.numel():
        # Kept entries rank last, and lower the number still needed.
        members = members.masked_fill(kept, -math.inf)
        needed = n - kept.sum(0).clamp(max=n)
        kept |= (_ranks(members) < needed) & (members > -math.inf)


def _ranks(members: Tensor) -> Tensor:
    """rank_i = #{j: s_j > s_i} + #{j < i: s_j = s_i}, from one comparison per pair."""
    ranks = torch.zeros_like(members, dtype=torch.int32)
    for j in range(len(members)):
        for i in range(j):
            earlier_wins = members[i] >= members[j]
            ranks[j] += earlier_wins
            ranks[i] += ~earlier_wins
    return ranks


def _members(matrix: Tensor, m: int, axis: int) -> Tensor:
    """Returns a view (m, ...): the first members of all groups, the second members, and so on."""
    groups = matrix.shape[axis] // m
    grouped: Tensor = matrix.narrow(axis, 0, groups * m).unflatten(axis, (groups, m))
    return grouped.movedim(axis + 1, 0)
