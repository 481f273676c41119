"""Naive versions of the patterns, in Python loops over float64, to be checked against the paper by eye."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from sparsesam.masks.patterns import NM, Pattern, PerLayer, Structured

Scores = Mapping[str, np.ndarray]
Flags = dict[str, np.ndarray]


def select(pattern: Pattern, scores: Scores, sparsity: float | None, first: Flags | None = None) -> Flags:
    """The best allowed mask that contains ``first``."""
    if isinstance(pattern, PerLayer):
        own = {name: None if first is None else {name: first[name]} for name in scores}
        return merged(select(pattern.inner, {name: score}, sparsity, own[name]) for name, score in scores.items())
    if isinstance(pattern, NM):
        return {name: n_of_m(pattern, score, None if first is None else first[name]) for name, score in scores.items()}
    certain = first or {name: np.zeros(score.shape, dtype=bool) for name, score in scores.items()}
    left = round((1 - sparsity) * sum(score.size for score in scores.values())) - number(certain)
    free = {name: ~flags for name, flags in certain.items()}
    if isinstance(pattern, Structured):
        others = greedy(scores, pattern.unit, left, free, reach=pattern.rounding == "reach")
    else:
        others = top(inside(scores, free), left)
    return {name: others[name] | certain[name] for name in scores}


def drop(pattern: Pattern, keep: Scores, masks: Flags, ratio: float) -> Flags:
    """The masks without round(ratio * kept) of the kept weights, those with the smallest ``keep``."""
    if isinstance(pattern, PerLayer):
        return merged(drop(pattern.inner, {name: keep[name]}, {name: masks[name]}, ratio) for name in masks)
    if isinstance(pattern, NM):
        return drop_n_of_m(pattern, keep, masks, ratio)
    left = number(masks) - round(ratio * number(masks))
    return (
        greedy(keep, pattern.unit, left, masks) if isinstance(pattern, Structured) else top(inside(keep, masks), left)
    )


def top(scores: Scores, count: int) -> Flags:
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


def greedy(scores: Scores, unit: str, budget: int, among: Flags, *, reach: bool = False) -> Flags:
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
    """Index of every entry of every full group of m, along one axis of the im2col matrix."""
    outputs, inputs = shape[0], math.prod(shape[1:])
    length, lines = (outputs, inputs) if axis == "output" else (inputs, outputs)
    for i in range(lines):
        for start in range(0, length - m + 1, m):
            members = [(k, i) if axis == "output" else (i, k) for k in range(start, start + m)]
            yield [(row, *map(int, np.unravel_index(column, shape[1:]))) for row, column in members]


def n_of_m(pattern: NM, score: np.ndarray, first: np.ndarray | None) -> np.ndarray:
    if pattern.axis == "filters":
        rows = None if first is None else by_filter(first) == 1
        return spread(n_of_m(as_output(pattern), by_filter(score), rows), score.shape)
    fixed = (score > -math.inf) & (score.ndim >= 2 or pattern.vectors == "dense")
    kept = fixed if first is None else first.copy()
    for members in groups(score.shape, pattern.m, pattern.axis) if score.ndim >= 2 else ():
        certain = [index for index in members if first is not None and first[index]]
        others = sorted((index for index in members if index not in certain), key=lambda index: -score[index])
        wanted = certain + [index for index in others if score[index] > -math.inf][: pattern.n - len(certain)]
        for index in members:
            kept[index] = index in wanted
    return kept


def drop_n_of_m(pattern: NM, keep: Scores, masks: Flags, ratio: float) -> Flags:
    """Weights outside of full groups are fixed."""
    if pattern.axis == "filters":
        rows = {name: by_filter(mask) == 1 for name, mask in masks.items()}
        kept = drop_n_of_m(as_output(pattern), {name: by_filter(score) for name, score in keep.items()}, rows, ratio)
        return {name: spread(kept[name], mask.shape) for name, mask in masks.items()}
    free = {name: np.zeros(mask.shape, dtype=bool) for name, mask in masks.items()}
    for name, mask in masks.items():
        for members in groups(mask.shape, pattern.m, pattern.axis) if mask.ndim >= 2 else ():
            for index in members:
                free[name][index] = mask[index]
    left = top(inside(keep, free), number(free) - round(ratio * number(free)))
    return {name: left[name] | (mask & ~free[name]) for name, mask in masks.items()}


def as_output(pattern: NM) -> NM:
    return NM(pattern.n, pattern.m, vectors=pattern.vectors)


def by_filter(values: np.ndarray) -> np.ndarray:
    """The mean of each filter, (O, 1); vectors and scalars unchanged."""
    return values.reshape(len(values), -1).mean(1, keepdims=True) if values.ndim >= 2 else values * 1.0


def spread(kept: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `by_filter`: every entry has the value of its filter."""
    return np.broadcast_to(kept.reshape(kept.shape[:1] + (1,) * (len(shape) - 1)), shape)


def inside(scores: Scores, masks: Flags) -> Flags:
    return {name: np.where(masks[name], score, -math.inf) for name, score in scores.items()}


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
