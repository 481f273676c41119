"""Agreement of the Fisher information with the diagonal of the Hessian."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from sparsesam.analysis.hessian import HessianOperator, hessian_diagonal
from sparsesam.analysis.objective import Objective, ParameterFilter
from sparsesam.analysis.results import Array, Measurement
from sparsesam.masks.fisher import fisher_diagonal


@dataclass(frozen=True)
class FisherAgreement(Measurement):
    """Fisher diagonal F against Hessian diagonal h over all weights.

    ``pearson`` and ``spearman`` correlate F with h; ``*_magnitude`` with |h|, which measures flatness where h is
    negative (``negative_share``). ``kept_in_common[s]``: the share of the weights kept by Fisher at sparsity s that
    |h| would keep too; 1 - s is expected by chance. ``scatter``: up to 2000 pairs (F, h).
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


def fisher_vs_hessian(
    objective: Objective,
    *,
    probes: int | None = None,
    exact_up_to: int = 5000,
    labels: Literal["data", "sampled"] = "data",
    parameters: ParameterFilter = None,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FisherAgreement:
    """Correlate the Fisher diagonal (from per-sample gradients, as in SSAM-F) with the Hessian diagonal.

    The Hessian diagonal is estimated with ``probes`` random sign vectors, whose noise lowers the correlation. By
    default it is exact (one product per weight) up to ``exact_up_to`` weights, and uses 100 probes beyond.
    ``progress(done, total)`` is called after every product.
    """
    hessian = HessianOperator(objective, parameters=parameters)
    if probes is None and hessian.size > exact_up_to:
        probes = 100
    hessian.on_product = lambda: progress(hessian.products, probes or hessian.size)
    if objective.statistics != "frozen":
        raise ValueError(f"statistics must be 'frozen', as for the Fisher diagonal, got {objective.statistics!r}")
    fisher = fisher_diagonal(
        objective.model,
        objective.batches,
        objective.problem.loss_fn,
        model_loss=objective.problem.model_loss,
        parameters=dict(hessian.parameters),
        labels=labels,
        generator=torch.Generator().manual_seed(seed) if labels == "sampled" else None,
    )
    f = np.concatenate([fisher.values[name].double().reshape(-1).cpu().numpy() for name in hessian.parameters])
    h = hessian_diagonal(hessian, probes=probes, seed=seed)
    chosen = np.random.default_rng(seed).permutation(len(f))[:2000]
    return FisherAgreement(
        pearson=_pearson(f, h),
        spearman=_pearson(_ranks(f), _ranks(h)),
        pearson_magnitude=_pearson(f, np.abs(h)),
        spearman_magnitude=_pearson(_ranks(f), _ranks(np.abs(h))),
        negative_share=float((h < 0).mean()),
        kept_in_common={f"{s:g}": _kept_in_common(f, np.abs(h), s) for s in (0.5, 0.8, 0.9, 0.95)},
        weights=len(f),
        hessian="exact" if probes is None else f"estimated with {probes} random sign vectors",
        products=hessian.products,
        labels=labels,
        scatter=np.stack([f[chosen], h[chosen]], axis=1),
        **objective.measured(),
    )


def _pearson(a: Array, b: Array) -> float:
    with np.errstate(invalid="ignore"):  # NaN if either is constant
        return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Array) -> Array:
    """Returns ranks from 0; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts + 1) / 2)[inverse])


def _kept_in_common(a: Array, b: Array, sparsity: float) -> float:
    keep = max(1, round((1 - sparsity) * len(a)))
    first, second = (np.argsort(-values, kind="stable")[:keep] for values in (a, b))
    return len(np.intersect1d(first, second)) / keep
