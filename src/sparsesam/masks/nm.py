"""N of every M consecutive entries of a matrix."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Axis = Literal["output", "input"]


def as_matrix(tensor: Tensor) -> Tensor:
    """The im2col matrix (O, C * kh * kw) of a weight (O, C, kh, kw)."""
    return tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))


def choose_in_groups(scores: Tensor, n: int, m: int, axis: Axis, *, out: Tensor, first: Tensor | None = None) -> None:
    """Write into ``out`` the ``n`` largest of every ``m`` consecutive scores, ties by position.

    All arguments are matrices (O, K) of equal shape that divide into groups along ``axis``. Entries of ``first`` are
    chosen before the others and count towards ``n``; -inf is never chosen.
    """
    if scores.numel() == 0:
        return
    members, marks = _members(scores.detach(), m, axis), _members(out, m, axis)
    needed: Tensor | int = n
    if first is not None:
        # These rank behind all others and lower the number wanted.
        kept = _members(first, m, axis)
        members = [member.masked_fill(keep, -math.inf) for member, keep in zip(members, kept, strict=True)]
        needed = n - torch.stack(kept).sum(0).clamp(max=n)
    for i, (member, rank) in enumerate(zip(members, _ranks(members), strict=True)):
        chosen = (rank < needed) & (member > -math.inf)
        marks[i].copy_(chosen if first is None else chosen | kept[i])


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
