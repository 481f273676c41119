"""How much SAM's gradient differs from SGD's, for each weight (figure 1 of the paper):

    r = log10 |(g_SAM - g_SGD) / g_SGD|

The paper writes "log" without a base. r < 0 means a difference smaller than the gradient itself, whatever the base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sparsesam.analysis.objective import Objective, check_masks, moving, norm, select_parameters
from sparsesam.analysis.results import AnalysisResult, Array, ObjectiveSummary

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_EDGES = np.linspace(-6, 4, 101)


@dataclass(frozen=True)
class Differences(AnalysisResult):
    """The distribution of r over one group of weights.

    Of ``weights`` entries, ``both_zero`` have g_SAM = g_SGD = 0 and no r; ``from_zero`` have g_SGD = 0 only and
    r = +inf; ``equal`` have g_SAM = g_SGD ≠ 0 and r = -inf; ``not_finite`` have a gradient that is NaN or
    infinite. The rest is in ``histogram``, or ``below`` or ``above`` its range. ``share_below_zero`` is the share of
    r < 0, -inf included, among all entries with an r. ``quantiles`` are those of the finite r.
    """

    weights: int
    both_zero: int
    from_zero: int
    equal: int
    not_finite: int
    share_below_zero: float
    quantiles: dict[str, float]
    histogram: npt.NDArray[np.int64]
    below: int
    above: int


@dataclass(frozen=True)
class GradientDifference(AnalysisResult):
    """``inside`` and ``outside`` split the weights by the masks, and are None without masks."""

    rho: float | None
    edges: Array
    every: Differences
    layers: dict[str, Differences]
    inside: Differences | None
    outside: Differences | None
    gradient_norm: float
    measured_on: ObjectiveSummary | None


def gradient_difference(
    objective: Objective, rho: float = 0.05, *, masks: Mapping[str, Tensor] | None = None
) -> GradientDifference:
    """Compare the objective's gradient at w with that at w + rho * g / ||g||, SAM's ascent of every weight.

    Close to a minimum of the objective g_SGD vanishes and r is large for most weights; to measure r as it occurs in
    training, use one batch of the training batch size.
    """
    if not rho > 0:
        raise ValueError(f"rho must be positive, got {rho}; with 0 the two gradients are the same")
    chosen = select_parameters(objective.model)
    tensors = list(chosen.values())
    with objective.measuring(tensors):
        _, plain = objective.gradient(tensors)
        length = norm(plain)
        if not 0 < length < float("inf"):
            raise ValueError(f"the gradient's norm is {length}: SAM's ascent has no direction at these weights")
        with moving(tensors) as move:
            move((plain, rho / length))
            _, perturbed = objective.gradient(tensors)
    gradients = [dict(zip(chosen, tensors, strict=True)) for tensors in (plain, perturbed)]
    return replace(compare_gradients(*gradients, masks=masks), rho=rho, measured_on=objective.summary())


def compare_gradients(
    plain: Mapping[str, Tensor], perturbed: Mapping[str, Tensor], *, masks: Mapping[str, Tensor] | None = None
) -> GradientDifference:
    """Compare two given gradients by parameter name, for example those of one training step."""
    if plain.keys() != perturbed.keys() or any(plain[name].shape != perturbed[name].shape for name in plain):
        raise ValueError("the two gradients must have the same names and shapes")
    if not plain:
        raise ValueError("the gradients are empty; give {name: tensor}")
    g, h = ({name: _flat(tensors[name].double()) for name in plain} for tensors in (plain, perturbed))
    every_g, every_h = (np.concatenate(list(parts.values())) for parts in (g, h))
    kept = np.concatenate([_flat(mask) for mask in check_masks(masks, plain).values()])
    return GradientDifference(
        rho=None,
        edges=_EDGES,
        every=_differences(every_g, every_h),
        layers={name: _differences(g[name], h[name]) for name in plain},
        inside=None if masks is None else _differences(every_g[kept], every_h[kept]),
        outside=None if masks is None else _differences(every_g[~kept], every_h[~kept]),
        gradient_norm=norm(plain.values()),
        measured_on=None,
    )


def _differences(g: Array, h: Array) -> Differences:
    """``g`` is the plain gradient, ``h`` the perturbed one."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        r = np.log10(np.abs((h - g) / g))
    not_finite, both_zero = ~(np.isfinite(g) & np.isfinite(h)), (g == 0) & (h == 0)
    r[not_finite] = np.nan
    finite, defined = r[np.isfinite(r)], int((~np.isnan(r)).sum())
    quantiles = np.quantile(finite, _QUANTILES) if len(finite) else np.full(len(_QUANTILES), np.nan)
    return Differences(
        weights=len(r),
        both_zero=int(both_zero.sum()),
        from_zero=int(np.isposinf(r).sum()),
        equal=int(np.isneginf(r).sum()),
        not_finite=int(not_finite.sum()),
        share_below_zero=float((r < 0).sum() / defined) if defined else float("nan"),
        quantiles={f"{q:g}": float(value) for q, value in zip(_QUANTILES, quantiles, strict=True)},
        histogram=np.histogram(finite, _EDGES)[0].astype(np.int64),
        below=int((finite < _EDGES[0]).sum()),
        above=int((finite > _EDGES[-1]).sum()),
    )


def _flat(tensor: Tensor) -> npt.NDArray[Any]:
    return np.asarray(tensor.detach().reshape(-1).cpu().numpy())
