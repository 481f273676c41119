"""Masks over a training run, and the agreement of Fisher information with the Hessian's diagonal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsesam.analysis.hessian import hessian_diagonal
from sparsesam.analysis.hessian_operator import HessianOperator
from sparsesam.analysis.objective import Objective, ObjectiveSummary, ParameterFilter
from sparsesam.analysis.results import AnalysisResult
from sparsesam.masks.fisher import fisher_diagonal

Array = npt.NDArray[np.float64]


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
        self.ones: list[dict[str, int]] = []
        self.both: list[dict[str, int]] = []
        self.either: list[dict[str, int]] = []
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
        self.ones.append({name: int(mask.sum()) for name, mask in here.items()})
        if self.previous is not None:
            before = self.previous
            self.both.append({name: int((mask & before[name]).sum()) for name, mask in here.items()})
            self.either.append({name: int((mask | before[name]).sum()) for name, mask in here.items()})
        for name, mask in here.items():
            self.ever[name] |= mask
            self.always[name] &= mask
        self.previous = {name: mask.clone() for name, mask in here.items()}

    def result(self) -> MaskHistory:
        weights = {name: shape.numel() for name, shape in self.shapes.items()}
        total = sum(weights.values())
        if total == 0:
            raise ValueError("the masks hold no entries")
        by_layer = {name: np.array([_share(ones[name], weights[name]) for ones in self.ones]) for name in weights}
        return MaskHistory(
            steps=self.steps,
            weights=weights,
            density=np.array([sum(ones.values()) / total for ones in self.ones]),
            density_by_layer=by_layer,
            overlap=np.array(
                [
                    _share(sum(both.values()), sum(either.values()))
                    for both, either in zip(self.both, self.either, strict=True)
                ]
            ),
            overlap_by_layer={
                name: np.array([_share(b[name], e[name]) for b, e in zip(self.both, self.either, strict=True)])
                for name in weights
            },
            overlap_by_chance=self._by_chance(by_layer, weights),
            ever=sum(int(mask.sum()) for mask in self.ever.values()) / total,
            ever_by_layer={name: _share(int(mask.sum()), weights[name]) for name, mask in self.ever.items()},
            always=sum(int(mask.sum()) for mask in self.always.values()) / total,
        )

    def _by_chance(self, densities: Mapping[str, Array], weights: Mapping[str, int]) -> Array:
        """E|A ∩ B| / E|A ∪ B| of independent masks with p and q of each layer: pq and p + q - pq."""
        both, either = np.zeros(len(self.steps) - 1), np.zeros(len(self.steps) - 1)
        for name, density in densities.items():
            if weights[name]:
                p, q = density[:-1], density[1:]
                both += weights[name] * p * q
                either += weights[name] * (p + q - p * q)
        return np.divide(both, either, out=np.full_like(both, np.nan), where=either > 0)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


@dataclass(frozen=True)
class FisherAgreement(AnalysisResult):
    """Fisher diagonal F against Hessian diagonal h over all weights.

    ``pearson`` and ``spearman`` correlate F with h; ``*_magnitude`` with |h|, which is what flatness means where
    h is negative (``negative_share``). ``kept_in_common[s]``: the share of the weights kept by Fisher at sparsity
    s that |h| would keep too; 1 - s of them would be by chance. ``scatter``: up to 2000 pairs (F, h).
    """

    pearson: float
    spearman: float
    pearson_magnitude: float
    spearman_magnitude: float
    negative_share: float
    kept_in_common: dict[str, float]
    weights: int
    hessian: str
    products: int
    labels: str
    scatter: Array
    measured_on: ObjectiveSummary
    notes: list[str]


def fisher_vs_hessian(
    objective: Objective,
    *,
    probes: int | None = None,
    exact_up_to: int = 5000,
    labels: str = "data",
    sparsities: Sequence[float] = (0.5, 0.8, 0.9, 0.95),
    parameters: ParameterFilter = None,
    seed: int = 0,
) -> FisherAgreement:
    """Correlate the Fisher diagonal (one gradient per sample, as SSAM-F measures it) with the Hessian's.

    The Hessian's is exact, at one product per weight, up to ``exact_up_to`` weights; beyond that ``probes``
    random sign vectors must be given, and their noise lowers the correlation.
    """
    hessian = HessianOperator(objective, parameters=parameters)
    if probes is None and hessian.size > exact_up_to:
        raise ValueError(
            f"the exact diagonal takes one product per weight, {hessian.size} of them; "
            f"give probes=100 for an estimate, a parameters filter, or exact_up_to={hessian.size}"
        )
    if objective.statistics != "frozen":
        raise ValueError(f"statistics must be 'frozen' as in the Fisher's measurement, got {objective.statistics!r}")
    loss_fn: Callable[[Any, Any], Tensor] | None = objective.loss_fn
    fisher = fisher_diagonal(
        objective.model,
        objective.batches,
        loss_fn,
        model_loss=objective.model_loss,
        parameters=dict(hessian.parameters),
        labels=labels,  # type: ignore[arg-type]
        generator=torch.Generator().manual_seed(seed) if labels == "sampled" else None,
    )
    f = np.concatenate([fisher.values[name].double().reshape(-1).cpu().numpy() for name in hessian.parameters])
    h = hessian_diagonal(hessian, probes=probes, seed=seed)
    chosen = np.random.default_rng(seed).permutation(len(f))[:2000]
    notes = list(hessian.notes)
    if min(f.std(), h.std()) == 0:
        notes.append("one of the two is constant: their correlation is not defined")
    return FisherAgreement(
        pearson=_pearson(f, h),
        spearman=_pearson(_ranks(f), _ranks(h)),
        pearson_magnitude=_pearson(f, np.abs(h)),
        spearman_magnitude=_pearson(_ranks(f), _ranks(np.abs(h))),
        negative_share=float((h < 0).mean()),
        kept_in_common={f"{s:g}": _kept_in_common(f, np.abs(h), s) for s in sparsities},
        weights=len(f),
        hessian="exact" if probes is None else f"estimated with {probes} random sign vectors",
        products=hessian.products,
        labels=labels,
        scatter=np.stack([f[chosen], h[chosen]], axis=1),
        measured_on=objective.describe(),
        notes=notes,
    )


def _pearson(a: Array, b: Array) -> float:
    a, b = a - a.mean(), b - b.mean()
    length = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / length if length > 0 else math.nan


def _ranks(values: Array) -> Array:
    """Ranks from 0, equal values sharing their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts + 1) / 2)[inverse], dtype=np.float64)


def _kept_in_common(a: Array, b: Array, sparsity: float) -> float:
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsities must be in [0, 1), got {sparsity}")
    keep = max(1, round((1 - sparsity) * len(a)))
    first, second = (set(np.argsort(-values, kind="stable")[:keep].tolist()) for values in (a, b))
    return len(first & second) / keep
