"""How masks change over a training run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsesam.analysis.results import AnalysisResult, Array
from sparsesam.utils.checks import check_bool


@dataclass(frozen=True)
class MaskHistory(AnalysisResult):
    """Snapshots of masks, S of them over L layers (parameters).

    ``density``: (S,) and per layer (S,), the share of ones. ``overlap``: (S - 1,), the Jaccard index
    |A ∩ B| / |A ∪ B| of a snapshot with the previous one, NaN where both are empty; ``overlap_by_chance`` is the
    overlap of random masks with these layer densities. ``ever``: the share of weights perturbed in at least one
    snapshot; ``always``: in all of them.
    """

    steps: list[int]
    weights: dict[str, int]
    density: Array
    density_by_layer: dict[str, Array]
    overlap: Array
    overlap_by_chance: Array
    ever: float
    always: float


def masks_over_time(snapshots: Iterable[tuple[int, Mapping[str, Tensor]]]) -> MaskHistory:
    """Summarize (step, {name: bool tensor}) pairs, such as (opt.steps, opt.masks) after each refresh.

    Snapshots are read one at a time; at most two are in memory.
    """
    shapes: dict[str, torch.Size] = {}
    steps: list[int] = []
    ones: list[list[int]] = []  # by snapshot and layer
    common: list[int] = []
    previous = ever = always = torch.zeros(0, dtype=torch.bool)  # all layers as one vector
    for step, masks in snapshots:
        shapes = shapes or {name: mask.shape for name, mask in masks.items()}
        mask = _flat(step, masks, shapes)
        if not steps:
            ever = always = mask
        elif step < steps[-1]:
            raise ValueError(f"snapshots must be ordered by step, got {step} after {steps[-1]}")
        else:
            ever, always = ever | mask, always & mask
            common.append(int((mask & previous).sum()))
        ones.append([int(part.sum()) for part in mask.split([shape.numel() for shape in shapes.values()])])
        steps.append(int(step))
        previous = mask
    if not steps:
        raise ValueError("snapshots is empty; give [(step, {name: bool tensor}), ...]")
    weights, counts = {name: shape.numel() for name, shape in shapes.items()}, np.array(ones, dtype=np.float64)
    sizes, sums = np.array(list(weights.values()), dtype=np.float64), counts.sum(1)
    p, q = counts[:-1] / np.maximum(sizes, 1), counts[1:] / np.maximum(sizes, 1)
    return MaskHistory(
        steps=steps,
        weights=weights,
        density=sums / sizes.sum(),
        density_by_layer=dict(zip(shapes, _ratio(counts, sizes).T, strict=True)),
        overlap=_ratio(np.array(common), sums[:-1] + sums[1:] - common),
        # E|A ∩ B| / E|A ∪ B| of independent masks with the densities p and q of each layer
        overlap_by_chance=_ratio((p * q) @ sizes, (p + q - p * q) @ sizes),
        ever=int(ever.sum()) / len(ever),
        always=int(always.sum()) / len(always),
    )


def _flat(step: int, masks: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> Tensor:
    if not sum(shape.numel() for shape in shapes.values()):
        raise ValueError("the first snapshot holds no masks: opt.masks is empty until the mask is first used")
    if {name: mask.shape for name, mask in masks.items()} != shapes:
        raise ValueError(f"the snapshot of step {step} has different names or shapes than the first")
    check_bool(f"masks of step {step}: masks", masks)
    return torch.cat([masks[name].detach().reshape(-1).cpu() for name in shapes])


def _ratio(part: Array, whole: Array) -> Array:
    """Returns part / whole, NaN where the whole is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(whole > 0, part / whole, np.nan))
