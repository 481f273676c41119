"""Masks over a training run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsesam.analysis.results import AnalysisResult, Array


@dataclass(frozen=True)
class MaskHistory(AnalysisResult):
    """Snapshots of masks, S of them over L layers (parameters).

    ``density``: (S,) and per layer (S,), the share of ones. ``overlap``: (S - 1,), the Jaccard index
    |A ∩ B| / |A ∪ B| of a snapshot with the one before, NaN where both are empty; ``overlap_by_chance`` is what
    masks drawn at random with these layer densities would have. ``ever``: the share of weights perturbed in at
    least one snapshot; ``always``: in all of them.
    """

    steps: list[int]
    weights: dict[str, int]
    density: Array
    density_by_layer: dict[str, Array]
    overlap: Array
    overlap_by_layer: dict[str, Array]
    overlap_by_chance: Array
    ever: float
    ever_by_layer: dict[str, float]
    always: float


def masks_over_time(snapshots: Iterable[tuple[int, Mapping[str, Tensor]]]) -> MaskHistory:
    """Summarize (step, {name: bool tensor}) pairs, such as (opt.steps, opt.masks) after each refresh.

    Snapshots are read one after the other; two are in memory at a time.
    """
    history: _History | None = None
    for step, masks in snapshots:
        if history is None:
            history = _History({name: mask.shape for name, mask in masks.items()})
        history.add(step, masks)
    if history is None:
        raise ValueError("snapshots is empty; give [(step, {name: bool tensor}), ...]")
    return history.result()


class _History:
    """Counts of ones, a row for each snapshot (``ones``) or pair of neighbours, and a column for each layer.

    ``previous``, ``ever`` and ``always`` are the masks of all layers as one vector.
    """

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.shapes = shapes
        self.sizes = [shape.numel() for shape in shapes.values()]
        if not sum(self.sizes):
            raise ValueError("the first snapshot holds no masks: opt.masks is empty before the mask's first use")
        self.steps: list[int] = []
        self.ones: list[Array] = []
        self.both: list[Array] = []
        self.either: list[Array] = []
        self.previous = self.ever = torch.zeros(sum(self.sizes), dtype=torch.bool)
        self.always = ~self.ever

    def add(self, step: int, masks: Mapping[str, Tensor]) -> None:
        if {name: mask.shape for name, mask in masks.items()} != self.shapes:
            raise ValueError(f"the snapshot of step {step} has other names or shapes than the first")
        if self.steps and step < self.steps[-1]:
            raise ValueError(f"snapshots must be in the order of their steps, got {step} after {self.steps[-1]}")
        if any(mask.dtype != torch.bool for mask in masks.values()):
            raise ValueError(f"the masks of step {step} must be bool tensors; use mask.bool()")
        mask = torch.cat([masks[name].detach().reshape(-1).cpu() for name in self.shapes])
        if self.steps:
            self.both.append(self._count(mask & self.previous))
            self.either.append(self._count(mask | self.previous))
        self.previous, self.ever, self.always = mask, self.ever | mask, self.always & mask
        self.steps.append(int(step))
        self.ones.append(self._count(mask))

    def result(self) -> MaskHistory:
        weights = np.array(self.sizes, dtype=np.float64)
        ones = np.array(self.ones)
        both, either = (np.array(rows).reshape(-1, len(weights)) for rows in (self.both, self.either))
        ever = self._count(self.ever)
        p, q = (_ratio(rows, np.maximum(weights, 1)) for rows in (ones[:-1], ones[1:]))
        return MaskHistory(
            steps=self.steps,
            weights=dict(zip(self.shapes, self.sizes, strict=True)),
            density=ones.sum(1) / weights.sum(),
            density_by_layer=self._by_layer(_ratio(ones, weights)),
            overlap=_ratio(both.sum(1), either.sum(1)),
            overlap_by_layer=self._by_layer(_ratio(both, either)),
            # E|A ∩ B| / E|A ∪ B| of independent masks with the densities p and q of each layer
            overlap_by_chance=_ratio((p * q) @ weights, (p + q - p * q) @ weights),
            ever=float(ever.sum() / weights.sum()),
            ever_by_layer=dict(zip(self.shapes, _ratio(ever, weights).tolist(), strict=True)),
            always=float(self.always.sum()) / float(weights.sum()),
        )

    def _count(self, mask: Tensor) -> Array:
        return np.array([int(part.sum()) for part in mask.split(self.sizes)], dtype=np.float64)

    def _by_layer(self, columns: Array) -> dict[str, Array]:
        return dict(zip(self.shapes, columns.T, strict=True))


def _ratio(part: Array, whole: Array) -> Array:
    """NaN where the whole is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(whole > 0, part / whole, np.nan))
