"""Naive versions of the patterns, in Python loops over float64, to be checked against the paper by eye."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sparsesam.masks.patterns import NM, Pattern, PerLayer

Scores = Mapping[str, np.ndarray]
Flags = dict[str, np.ndarray]


def select(pattern: Pattern, scores: Scores, sparsity: float | None, first: Flags | None = None) -> Flags:
    """The best allowed mask that contains ``first``."""
    if isinstance(pattern, PerLayer):
        own = {name: None if first is None else {name: first[name]} for name in scores}
        return merged(select(pattern.inner, {name: score}, sparsity, own[name]) for name, score in scores.items())
    if isinstance(pattern, NM) and pattern.axis == "filters":
        kept = None if first is None else by_filter(first, np.all)
        return spread(select(replace(pattern, axis="output"), by_filter(scores, np.mean), None, kept), scores)
    if isinstance(pattern, NM):
        return {name: n_of_m(pattern, score, None if first is None else first[name]) for name, score in scores.items()}
    certain = first or {name: np.zeros(score.shape, dtype=bool) for name, score in scores.items()}
    left = round((1 - sparsity) * sum(score.size for score in scores.values())) - number(certain)
    free = {name: ~flags for name, flags in certain.items()}
    others = greedy(scores, pattern.unit, left, free, reach="reach" in repr(pattern))
    return {name: others[name] | certain[name] for name in scores}


def drop(pattern: Pattern, keep: Scores, masks: Flags, ratio: float) -> Flags:
    """The masks without round(ratio * kept) of the kept weights, those with the smallest ``keep``."""
    if isinstance(pattern, PerLayer):
        return merged(drop(pattern.inner, {name: keep[name]}, {name: masks[name]}, ratio) for name in masks)
    if isinstance(pattern, NM) and pattern.axis == "filters":
        return spread(
            drop(replace(pattern, axis="output"), by_filter(keep, np.mean), by_filter(masks, np.all), ratio), masks
        )
    free = {name: in_groups(pattern, mask) & mask for name, mask in masks.items()} if isinstance(pattern, NM) else masks
    left = number(free) - round(ratio * number(free))
    kept = greedy(keep, pattern.unit, left, free)
    return {name: kept[name] | (mask & ~free[name]) for name, mask in masks.items()}


def top(scores: Scores, count: int) -> Flags:
    return greedy(scores, None, count, {name: np.ones(score.shape, dtype=bool) for name, score in scores.items()})


def units(shape: tuple[int, ...], unit: str | None) -> Iterator[tuple[object, ...]]:
    """Index of every unit of a tensor; None: of every weight."""
    if unit is None:
        yield from np.ndindex(shape)
    elif unit == "tensor" or len(shape) == 0:
        yield (...,)
    elif unit == "filter" or len(shape) == 1:
        for i in range(shape[0]):
            yield (i, ...)
    else:
        for j in range(shape[1]):
            yield (slice(None), j, ...)


def greedy(scores: Scores, unit: str | None, budget: int, among: Flags, *, reach: bool = False) -> Flags:
    """Visit all units by decreasing mean score; take each that still fits or, with ``reach``, until none is missing."""
    kept = {name: np.zeros(score.shape, dtype=bool) for name, score in scores.items()}
    every = [(name, index) for name, score in scores.items() for index in units(score.shape, unit)]
    # math.fsum: the mean does not depend on the order of summation.
    means = [math.fsum(np.ravel(scores[name][index])) / np.size(scores[name][index]) for name, index in every]
    for place in sorted(range(len(every)), key=lambda place: (-means[place], place)):
        name, index = every[place]
        size = np.size(scores[name][index])
        fits = budget > 0 if reach else size <= budget
        if fits and means[place] > -math.inf and np.all(among[name][index]):
            kept[name][index] = True
            budget -= size
    return kept


def groups(shape: tuple[int, ...], m: int, axis: str) -> Iterator[list[tuple[int, ...]]]:
    """Index of every entry of every full group of m, along one axis of the im2col matrix; vectors have no groups."""
    if len(shape) < 2:
        return
    outputs, inputs = shape[0], math.prod(shape[1:])
    length, lines = (outputs, inputs) if axis == "output" else (inputs, outputs)
    for i in range(lines):
        for start in range(0, length - m + 1, m):
            members = [(k, i) if axis == "output" else (i, k) for k in range(start, start + m)]
            yield [(row, *map(int, np.unravel_index(column, shape[1:]))) for row, column in members]


def n_of_m(pattern: NM, score: np.ndarray, first: np.ndarray | None) -> np.ndarray:
    """Entries outside of full groups are all kept."""
    kept = score > -math.inf if first is None else first.copy()
    for members in groups(score.shape, pattern.m, pattern.axis):
        certain = [index for index in members if first is not None and first[index]]
        others = sorted((index for index in members if index not in certain), key=lambda index: -score[index])
        wanted = certain + [index for index in others if score[index] > -math.inf][: pattern.n - len(certain)]
        for index in members:
            kept[index] = index in wanted
    return kept


def in_groups(pattern: NM, mask: np.ndarray) -> np.ndarray:
    found = np.zeros(mask.shape, dtype=bool)
    for members in groups(mask.shape, pattern.m, pattern.axis):
        for index in members:
            found[index] = True
    return found


def by_filter(tensors: Scores, function: Callable[..., np.ndarray]) -> Flags:
    """A number for each filter, (O, 1); vectors and scalars unchanged."""
    return {
        name: function(values.reshape(len(values), -1), axis=1, keepdims=True) if values.ndim >= 2 else values
        for name, values in tensors.items()
    }


def spread(kept: Flags, like: Scores) -> Flags:
    """The inverse of `by_filter`: every entry has the value of its filter."""
    rows = {name: kept[name].reshape(kept[name].shape[:1] + (1,) * (values.ndim - 1)) for name, values in like.items()}
    return {name: np.broadcast_to(rows[name], values.shape) for name, values in like.items()}


def merged(parts: Iterator[Flags]) -> Flags:
    return {name: flags for part in parts for name, flags in part.items()}


def number(flags: Scores) -> int:
    return sum(int(flag.sum()) for flag in flags.values())


def as_float64(scores: Mapping[str, Tensor]) -> Flags:
    return {name: tensor.double().numpy().copy() for name, tensor in scores.items()}


def as_flags(masks: Mapping[str, Tensor]) -> Flags:
    return {name: mask.numpy() for name, mask in masks.items()}


def same(masks: Mapping[str, Tensor], flags: Mapping[str, np.ndarray]) -> bool:
    return list(masks) == list(flags) and all(
        mask.dtype == torch.bool and mask.is_contiguous() and np.array_equal(mask.numpy(), flags[name])
        for name, mask in masks.items()
    )
