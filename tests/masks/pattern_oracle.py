"""Naive versions of the selections, in Python loops over float64, to be checked against the paper by eye."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

Flags = dict[str, np.ndarray]


def as_float64(scores: Mapping[str, Tensor]) -> Flags:
    return {name: tensor.double().numpy().copy() for name, tensor in scores.items()}


def top(scores: Mapping[str, np.ndarray], count: int) -> Flags:
    """The first ``count`` positions of a stable descending sort, without those of -inf."""
    flat = np.concatenate([score.reshape(-1) for score in scores.values()])
    order = [i for i in np.argsort(-flat, kind="stable") if flat[i] > -math.inf][:count]
    chosen = np.zeros(len(flat), dtype=bool)
    chosen[order] = True
    ends = np.cumsum([score.size for score in scores.values()])
    parts = np.split(chosen, ends[:-1])
    return {name: part.reshape(score.shape) for (name, score), part in zip(scores.items(), parts, strict=True)}


def units(shape: tuple[int, ...], unit: str) -> Iterator[tuple[object, ...]]:
    """Index of every unit of a tensor."""
    if unit == "tensor" or len(shape) == 0:
        yield (...,)
    elif unit == "filter" or len(shape) == 1:
        for i in range(shape[0]):
            yield (i, ...)
    else:
        for j in range(shape[1]):
            yield (slice(None), j, ...)


def greedy(
    scores: Mapping[str, np.ndarray], unit: str, budget: int, among: Flags | None = None, *, reach: bool = False
) -> Flags:
    """Visit all units by decreasing mean score; take each that still fits or, with ``reach``, until none is missing."""
    kept = {name: np.zeros(score.shape, dtype=bool) for name, score in scores.items()}
    every = [(name, index) for name, score in scores.items() for index in units(score.shape, unit)]
    # math.fsum: the mean does not depend on the order of summation.
    mean = {
        place: math.fsum(np.ravel(scores[name][index])) / np.size(scores[name][index])
        for place, (name, index) in enumerate(every)
    }
    for place in sorted(mean, key=lambda place: (-mean[place], place)):
        name, index = every[place]
        if among is not None and not np.all(among[name][index]):
            continue
        size = np.size(scores[name][index])
        if (budget > 0 if reach else size <= budget) and mean[place] > -math.inf:
            kept[name][index] = True
            budget -= size
    return kept


def groups(shape: tuple[int, ...], m: int, axis: str) -> Iterator[list[tuple[int, ...]]]:
    """Index of every entry of every group of at most m, along one axis of the im2col matrix."""
    outputs, inputs = shape[0], math.prod(shape[1:])
    for i in range(inputs if axis == "output" else outputs):
        length = outputs if axis == "output" else inputs
        for start in range(0, length, m):
            members = [(k, i) if axis == "output" else (i, k) for k in range(start, min(start + m, length))]
            yield [(row, *map(int, np.unravel_index(column, shape[1:]))) for row, column in members]


def n_of_m(score: np.ndarray, n: int, m: int, axis: str, vectors: str, first: np.ndarray | None = None) -> np.ndarray:
    if score.ndim < 2:
        return np.full(score.shape, vectors == "dense") & (score > -math.inf)
    kept = np.zeros(score.shape, dtype=bool)
    for members in groups(score.shape, m, axis):
        if len(members) < m:
            wanted = members
        else:
            certain = [index for index in members if first is not None and first[index]]
            others = sorted((index for index in members if index not in certain), key=lambda index: -score[index])
            wanted = certain + [index for index in others if score[index] > -math.inf][: n - len(certain)]
        for index in wanted:
            kept[index] = True
    return kept


def number(flags: Mapping[str, np.ndarray | Tensor]) -> int:
    return sum(int(np.asarray(flag).sum()) for flag in flags.values())


def same(masks: Mapping[str, Tensor], flags: Mapping[str, np.ndarray]) -> bool:
    return list(masks) == list(flags) and all(
        masks[name].dtype == torch.bool
        and masks[name].is_contiguous()
        and masks[name].shape == flags[name].shape
        and np.array_equal(masks[name].cpu().numpy(), flags[name])
        for name in flags
    )
