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

    def __post_init__(self) -> None:
        count = len(self.steps)
        per_mask = [self.density, *self.density_by_layer.values()]
        per_change = [self.overlap, self.overlap_by_chance, *self.overlap_by_layer.values()]
        if any(len(one) != count for one in per_mask) or any(len(one) != count - 1 for one in per_change):
            raise ValueError(f"{count} masks must have {count} densities and {count - 1} overlaps")


def masks_over_time(snapshots: Iterable[tuple[int, Mapping[str, Tensor]]]) -> MaskHistory:
    """Summarize (step, {name: bool tensor}) pairs, such as (opt.steps, opt.masks) after each refresh.

    Snapshots are read one after the other; two are in memory at a time.
    """
    history: _History | None = None
    for step, masks in snapshots:
        if history is None:
            history = _History(masks)
        history.add(step, masks)
    if history is None:
        raise ValueError("snapshots is empty; give [(step, {name: bool tensor}), ...]")
    return history.result()


class _History:
    def __init__(self, first: Mapping[str, Tensor]) -> None:
        if not first:
            raise ValueError("the first snapshot holds no masks: opt.masks is empty before the mask's first use")
        self.shapes = {name: mask.shape for name, mask in first.items()}
        self.steps: list[int] = []
        self.ones: list[list[int]] = []
        self.both: list[list[int]] = []
        self.either: list[list[int]] = []
        self.ever = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in self.shapes.items()}
        self.always = {name: torch.ones(shape, dtype=torch.bool) for name, shape in self.shapes.items()}
        self.previous: dict[str, Tensor] | None = None

    def add(self, step: int, masks: Mapping[str, Tensor]) -> None:
        if {name: mask.shape for name, mask in masks.items()} != self.shapes:
            raise ValueError(f"the snapshot of step {step} has other names or shapes than the first")
        if self.steps and step < self.steps[-1]:
            raise ValueError(f"snapshots must be in the order of their steps, got {step} after {self.steps[-1]}")
        if any(mask.dtype != torch.bool for mask in masks.values()):
            raise ValueError(f"the masks of step {step} must be bool tensors; use mask.bool()")
        here = {name: mask.detach().cpu() for name, mask in masks.items()}
        self.steps.append(int(step))
        self.ones.append([int(here[name].sum()) for name in self.shapes])
        if self.previous is not None:
            before = self.previous
            self.both.append([int((here[name] & before[name]).sum()) for name in self.shapes])
            self.either.append([int((here[name] | before[name]).sum()) for name in self.shapes])
        for name, mask in here.items():
            self.ever[name] |= mask
            self.always[name] &= mask
        self.previous = {name: mask.clone() for name, mask in here.items()}

    def result(self) -> MaskHistory:
        weights = np.array([shape.numel() for shape in self.shapes.values()], dtype=np.float64)
        if weights.sum() == 0:
            raise ValueError("the masks hold no entries")
        # One row per snapshot, or per pair of neighbours, and one column per layer.
        ones = np.array(self.ones, dtype=np.float64)
        both, either = (np.array(one, dtype=np.float64).reshape(-1, len(weights)) for one in (self.both, self.either))
        ever = np.array([int(mask.sum()) for mask in self.ever.values()])
        p, q = (_ratio(rows, np.maximum(weights, 1)) for rows in (ones[:-1], ones[1:]))
        return MaskHistory(
            steps=self.steps,
            weights={name: shape.numel() for name, shape in self.shapes.items()},
            density=ones.sum(1) / weights.sum(),
            density_by_layer=self._by_layer(_ratio(ones, weights)),
            overlap=_ratio(both.sum(1), either.sum(1)),
            overlap_by_layer=self._by_layer(_ratio(both, either)),
            # E|A ∩ B| / E|A ∪ B| of independent masks with the densities p and q of each layer
            overlap_by_chance=_ratio((p * q) @ weights, (p + q - p * q) @ weights),
            ever=float(ever.sum() / weights.sum()),
            ever_by_layer=dict(zip(self.shapes, _ratio(ever, weights).tolist(), strict=True)),
            always=sum(int(mask.sum()) for mask in self.always.values()) / float(weights.sum()),
        )

    def _by_layer(self, columns: Array) -> dict[str, Array]:
        return dict(zip(self.shapes, columns.T, strict=True))


def _ratio(part: Array, whole: Array) -> Array:
    """NaN where the whole is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(whole > 0, part / whole, np.nan))
