"""N of every M consecutive entries of a matrix."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from sparsesam.masks.select import Array, native

Axis = Literal["output", "input"]

_HOST_BLOCK = 1 << 16
_PAIRWISE_UP_TO = 64


def as_matrix(tensor: Tensor) -> Tensor:
    """The im2col matrix (O, C * kh * kw) of a weight (O, C, kh, kw)."""
    return tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))


def governed(matrix: Tensor, m: int, axis: Axis) -> Tensor:
    """The part of the matrix that divides into groups of ``m`` along ``axis`` (a view)."""
    if axis == "output":
        return matrix[: matrix.shape[0] // m * m]
    return matrix[:, : matrix.shape[1] // m * m]


def remainder(matrix: Tensor, m: int, axis: Axis) -> Tensor:
    """The part of the matrix that is left over (a view)."""
    if axis == "output":
        return matrix[matrix.shape[0] // m * m :]
    return matrix[:, matrix.shape[1] // m * m :]


def choose_in_groups(scores: Tensor, n: int, m: int, axis: Axis, *, out: Tensor, first: Tensor | None = None) -> None:
    """Write into ``out`` the ``n`` largest of every ``m`` consecutive scores, ties by position.

    All arguments are governed matrices (O, K) of equal shape. Entries of ``first`` are chosen before the
    others and count towards ``n``; -inf is never chosen.
    """
    if scores.numel() == 0 or m == 0:
        return
    slots, marks = _slots(native(scores), m, axis), _slots(native(out), m, axis)
    kept = None if first is None else _slots(native(first), m, axis)
    rows = len(slots[0])
    block = max(1, _HOST_BLOCK * rows // scores.numel()) if isinstance(slots[0], np.ndarray) else rows
    for start in range(0, rows, block):
        part = slice(start, start + block)
        _choose(
            [slot[part] for slot in slots],
            n,
            kept and [slot[part] for slot in kept],
            [x[part] for x in marks],
        )


def _choose(slots: list[Array], n: int, kept: list[Array] | None, marks: list[Array]) -> None:
    """slots[i] holds the i-th member of every group; an entry is chosen if fewer than n others beat it."""
    needed: Array = n
    if kept is not None:
        # The kept entries rank behind all others and lower the number wanted: rank < n - #kept.
        slots = [_masked_fill(slot, keep) for slot, keep in zip(slots, kept, strict=True)]
        taken = sum(_as_int(keep, wide=len(slots) > _PAIRWISE_UP_TO) for keep in kept)
        needed = n - taken.clip(max=n)
    ranks = _ranks_by_pairs(slots) if len(slots) <= _PAIRWISE_UP_TO else _ranks_by_sorting(slots)
    for i, (slot, rank, mark) in enumerate(zip(slots, ranks, marks, strict=True)):
        chosen = (rank < needed) & (slot > -math.inf)
        mark[...] = chosen if kept is None else chosen | kept[i]


def _ranks_by_pairs(slots: list[Array]) -> list[Array]:
    """rank_i = #{j: s_j > s_i} + #{j < i: s_j = s_i}, from one comparison per pair."""
    size = len(slots)
    ranks = [_full_like(slot, size - 1 - i) for i, slot in enumerate(slots)]
    for j in range(1, size):
        for i in range(j):
            earlier_wins = _as_int(slots[i] >= slots[j])
            ranks[j] += earlier_wins
            ranks[i] -= earlier_wins
    return ranks


def _ranks_by_sorting(slots: list[Array]) -> list[Array]:
    stacked = torch.stack([torch.as_tensor(slot) for slot in slots], dim=-1)
    order = stacked.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(len(slots), device=order.device).expand_as(order)
    ranks = torch.empty_like(order).scatter_(-1, order, places)
    return [rank.numpy() if isinstance(slots[0], np.ndarray) else rank for rank in ranks.unbind(-1)]


def _slots(matrix: Array, m: int, axis: Axis) -> list[Array]:
    """The i-th members of all groups, as views: no transposition to undo."""
    return [matrix[i::m] if axis == "output" else matrix[:, i::m] for i in range(m)]


def _full_like(array: Array, value: int) -> Array:
    # One byte holds every rank that is counted by pairs.
    if isinstance(array, np.ndarray):
        return np.full(array.shape, value, dtype=np.uint8)
    return torch.full_like(array, value, dtype=torch.uint8)


def _as_int(condition: Array, *, wide: bool = False) -> Array:
    if isinstance(condition, np.ndarray):
        return condition.astype(np.int32) if wide else condition.view(np.uint8)
    return condition.to(torch.int32 if wide else torch.uint8)


def _masked_fill(values: Array, where: Array) -> Array:
    if isinstance(values, np.ndarray):
        return np.where(where, values.dtype.type(-math.inf), values)
    return values.masked_fill(where, -math.inf)
