"""N of every M consecutive weights, or filters.

Of sharded tensors, the edge of a shard may cut a group: FSDP2 cuts along dimension 0, along which the groups of
axis="output" run. The scores of such a tensor are gathered on all ranks; all others are chosen where they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from sparsesam.distributed.shards import ShardLayout, Shards
from sparsesam.masks.checks import check_choice, check_count
from sparsesam.masks.patterns.base import Choice, Pattern, left_after_drop, scores_of
from sparsesam.masks.patterns.structured import Units
from sparsesam.masks.select import Tensors, check_scores, count_true, top_mask

Axis = Literal["output", "input"]


@dataclass(frozen=True)
class _NOfM(Pattern):
    n: int
    m: int
    knows_shards = True

    @property
    def implied_sparsity(self) -> float:
        """1 - n / m."""
        return 1 - self.n / self.m


@dataclass(frozen=True)
class NM(_NOfM):
    """Keeps ``n`` of every ``m`` consecutive entries of the im2col matrix (O, C * kh * kw).

    Args:
        n: entries kept in each group.
        m: entries of a group.
        axis: groups run along ``"output"``, O, the dimension contracted in dX = dY · W, or ``"input"``, C * kh * kw.
        remainder: a last group with fewer than m entries is kept whole, ``"dense"``, or refused, ``"error"``.
        vectors: tensors with fewer than two dimensions are kept whole, ``"dense"``, or not perturbed, ``"none"``.

    `drop_and_grow` drops N_drop = round(ratio * kept) of the entries that are kept in full groups, over all
    tensors together, and refills every group to n.
    """

    axis: Axis = "output"
    remainder: Literal["dense", "error"] = "dense"
    vectors: Literal["dense", "none"] = "dense"

    def __post_init__(self) -> None:
        check_count("m", self.m, "it is the size of a group, 4 in 2:4")
        check_count("n", self.n, "it is the number kept in a group, 2 in 2:4", least=0)
        if self.n > self.m:
            raise ValueError(
                f"n must be between 0 and m={self.m}, got {self.n}; n of every m consecutive entries are kept"
            )
        check_choice("axis", self.axis, get_args(Axis))
        check_choice("remainder", self.remainder, ("dense", "error"))
        check_choice("vectors", self.vectors, ("dense", "none"))

    def _choose(self, choice: Choice, like: Tensors, sparsity: float | None, shards: Shards) -> dict[str, Tensor]:
        scores = scores_of(choice, like, shards)
        check_scores(scores, shards)
        groups = self._groups(shards)
        masks = {name: self._outside_groups(score, groups.get(name)) for name, score in scores.items()}
        inside = {name: group.of(scores[name]) for name, group in groups.items()}
        self._fill(masks, inside, {name: group.of(masks[name]) for name, group in groups.items()}, groups, shards)
        return masks

    def _drop_and_grow(
        self, masks: Tensors, keep: Choice, grow: Choice, sparsity: float | None, ratio: float, shards: Shards
    ) -> dict[str, Tensor]:
        groups = self._groups(shards)
        grouped = {name: group.of(masks[name]).contiguous() for name, group in groups.items()}
        inside = shards.with_parts({name: group.layout for name, group in groups.items()})
        keep, grow = (
            choice
            if isinstance(choice, torch.Generator)
            else {name: group.of(choice[name]) for name, group in groups.items()}
            for choice in (keep, grow)
        )
        left = left_after_drop(count_true(grouped, inside), ratio)
        survivors = top_mask(scores_of(keep, grouped, inside), left, among=grouped, shards=inside)
        growth = scores_of(grow, grouped, inside)
        check_scores(growth, inside)
        # What lies outside full groups is fixed by the pattern, so it stays as it is.
        result = {name: mask.clone(memory_format=torch.contiguous_format) for name, mask in masks.items()}
        self._fill(result, growth, survivors, groups, shards)
        return result

    def _groups(self, shards: Shards) -> dict[str, _Groups]:
        """By name, for the tensors that have groups."""
        axis = 0 if self.axis == "output" else 1
        inside: dict[str, ShardLayout] = {}
        for name, part in shards.parts.items():
            if len(part.shape) < 2 or not part.shape.numel():
                continue
            matrix = part.as_matrix()
            sizes = list(matrix.shape)
            sizes[axis] -= sizes[axis] % self.m
            if sizes[axis] < matrix.shape[axis] and self.remainder == "error":
                raise ValueError(
                    f"{name!r} has {matrix.shape[axis]} entries along its {self.axis} axis, not a multiple of "
                    f"m={self.m}; choose another m or axis, or remainder='dense' to keep the last group whole"
                )
            inside[name] = matrix.first((sizes[0], sizes[1]))
        held = [(layout.indices[axis] // self.m).bincount() for layout in inside.values()]  # of each group
        cut = shards.sum_of(*(int(counts.remainder(self.m).any()) for counts in held)) if held else []
        return {name: _Groups(layout, is_cut > 0) for (name, layout), is_cut in zip(inside.items(), cut, strict=True)}

    def _outside_groups(self, score: Tensor, group: _Groups | None) -> Tensor:
        """The mask before its groups are filled: remainders and vectors."""
        mask = (score.detach() > -math.inf).contiguous()
        if group is not None:
            group.of(mask).fill_(False)
        elif score.dim() < 2 and self.vectors == "none":
            mask.fill_(False)
        return mask

    def _fill(
        self, masks: Tensors, scores: Tensors, first: Tensors, groups: Mapping[str, _Groups], shards: Shards
    ) -> None:
        """Choose n in every group of this rank's masks, in place; entries of ``first`` are chosen before others."""
        for name, group in groups.items():
            score, certain = scores[name], first[name]
            if group.is_cut:
                score, certain = shards.gathered(score, group.layout), shards.gathered(certain, group.layout) > 0
            chosen = choose_in_groups(score, certain, self.n, self.m, self.axis)
            group.of(masks[name]).copy_(group.layout.of(chosen) if group.is_cut else chosen)


@dataclass(frozen=True)
class _Groups:
    """The part of a matrix that divides into groups: what this rank holds of it, and whether shards cut a group."""

    layout: ShardLayout
    is_cut: bool

    def of(self, tensor: Tensor) -> Tensor:
        """What this rank has of the groups, as a matrix: a view."""
        rows, columns = self.layout.indices
        return as_matrix(tensor)[: len(rows), : len(columns)]


@dataclass(frozen=True)
class NMFilters(_NOfM):
    """``n`` of every ``m`` consecutive filters, by mean score: whole rows, which dense kernels can skip.

    This is `NM` along the output axis of the matrix of filter scores (O, 1), which every rank has whole; its
    drop_and_grow drops round(ratio * kept) filters of those in full groups.
    """

    remainder: Literal["dense", "error"] = "dense"
    vectors: Literal["dense", "none"] = "dense"

    def __post_init__(self) -> None:
        self._inner()

    def _choose(self, choice: Choice, like: Tensors, sparsity: float | None, shards: Shards) -> dict[str, Tensor]:
        units = Units("filter", shards)
        means = units.means(scores_of(choice, like, shards))
        return _expand(units, self._inner().select(_rows(units, means)), like)

    def _drop_and_grow(
        self, masks: Tensors, keep: Choice, grow: Choice, sparsity: float | None, ratio: float, shards: Shards
    ) -> dict[str, Tensor]:
        units = Units("filter", shards)
        scored, growth = (
            choice if isinstance(choice, torch.Generator) else _rows(units, units.means(choice))
            for choice in (keep, grow)
        )
        kept = _rows(units, units.kept(masks))
        return _expand(units, self._inner().drop_and_grow(kept, scored, growth, ratio=ratio), masks)

    def _inner(self) -> NM:
        return NM(self.n, self.m, remainder=self.remainder, vectors=self.vectors)


def _rows(units: Units, values: Tensors) -> dict[str, Tensor]:
    """(O,) -> (O, 1) for the tensors that are matrices, so that a filter is a row with one entry."""
    is_matrix = {name: len(part.shape) >= 2 for name, part in units.shards.parts.items()}
    return {name: value[:, None] if is_matrix[name] else value for name, value in values.items()}


def _expand(units: Units, rows: Mapping[str, Tensor], like: Tensors) -> dict[str, Tensor]:
    return units.expand({name: row.reshape(-1) for name, row in rows.items()}, like)


# ---- the choice in groups of a matrix ------------------------------------------------------------------------


def as_matrix(tensor: Tensor) -> Tensor:
    """The im2col matrix (O, C * kh * kw) of a weight (O, C, kh, kw)."""
    return tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))


def choose_in_groups(scores: Tensor, first: Tensor, n: int, m: int, axis: Axis) -> Tensor:
    """Marks the ``n`` largest of every ``m`` consecutive scores, ties by position.

    Both are matrices (O, K) that divide into groups along ``axis``. Entries of ``first`` are chosen before the others
    and count towards ``n``; -inf is never chosen.
    """
    chosen = torch.zeros_like(first)
    if not scores.numel():
        return chosen
    kept = _members(first, m, axis)
    # These rank behind all others and lower the number wanted.
    members = [
        one.masked_fill(keep, -math.inf) for one, keep in zip(_members(scores.detach(), m, axis), kept, strict=True)
    ]
    needed = n - torch.stack(kept).sum(0).clamp(max=n)
    for mark, keep, member, rank in zip(_members(chosen, m, axis), kept, members, _ranks(members), strict=True):
        mark.copy_((rank < needed) & (member > -math.inf) | keep)
    return chosen


def _ranks(members: list[Tensor]) -> list[Tensor]:
    """rank_i = #{j: s_j > s_i} + #{j < i: s_j = s_i}, from one comparison per pair."""
    size = len(members)
    dtype = torch.uint8 if size < 256 else torch.int32
    ranks = [torch.full_like(member, size - 1 - i, dtype=dtype) for i, member in enumerate(members)]
    for j in range(1, size):
        for i in range(j):
            earlier_wins = (members[i] >= members[j]).to(dtype)
            ranks[j] += earlier_wins
            ranks[i] -= earlier_wins
    return ranks


def _members(matrix: Tensor, m: int, axis: Axis) -> list[Tensor]:
    """The first members of all groups, the second ones, and so on, as views."""
    return [matrix[i::m] if axis == "output" else matrix[:, i::m] for i in range(m)]
