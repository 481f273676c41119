"""Eigenvalues, trace, spectral density and diagonal of the Hessian, from Hessian-vector products only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from sparsesam.analysis.hessian_operator import HessianOperator
from sparsesam.analysis.lanczos import lanczos, top_eigenpairs
from sparsesam.analysis.objective import Objective, ObjectiveSummary, ParameterFilter
from sparsesam.analysis.results import AnalysisResult, Array
from sparsesam.utils.checks import check_count


@dataclass(frozen=True, kw_only=True)
class HessianMeasurement(AnalysisResult):
    """Covers ``size`` weights in ``parameters``; took ``products`` Hessian-vector products."""

    products: int
    size: int
    parameters: list[str]
    measured_on: ObjectiveSummary
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class HessianSpectrum(HessianMeasurement):
    """The largest eigenvalues in descending order. ``error_bounds`` estimate |computed - true| from the residuals.

    ``ratio`` is lambda_1 / lambda_5, the paper's measure; None when fewer than five were requested.
    ``vectors`` are unit eigenvectors as directions, and are not part of `to_dict`.
    """

    eigenvalues: Array
    error_bounds: Array
    converged: bool
    ratio: float | None
    vectors: list[dict[str, Tensor]] = field(repr=False, default_factory=list, metadata={"stored": False})


def hessian_eigenvalues(
    objective: Objective,
    count: int = 5,
    *,
    tolerance: float = 1e-3,
    max_products: int = 1000,
    max_basis: int = 64,
    parameters: ParameterFilter = None,
    keep_graph: bool = False,
    seed: int = 0,
    on_product: Callable[[], None] = lambda: None,
) -> HessianSpectrum:
    """Compute the ``count`` largest eigenvalues to relative ``tolerance``.

    Lanczos with full reorthogonalization from one random vector, with thick restarts only when ``max_basis``
    vectors are stored, until every residual is below 0.3 * tolerance * |eigenvalue|. As in any Krylov method with one
    start vector, only one copy of a multiple eigenvalue is found, and some of several very close ones may be missed.
    """
    hessian = HessianOperator(objective, parameters=parameters, keep_graph=keep_graph, on_product=on_product)
    if not 1 <= count <= hessian.size:
        raise ValueError(f"count must be between 1 and the number of weights, {hessian.size}, got {count}")
    generator = torch.Generator().manual_seed(seed)
    with hessian.measuring():
        pairs = top_eigenpairs(
            hessian.__matmul__,
            hessian.random_normal(generator),
            count,
            tolerance=tolerance,
            max_products=max_products,
            max_basis=max_basis,
        )
    if not pairs.converged:
        hessian.notes.append(f"not converged to {tolerance} within {hessian.products} products: raise max_products")
    values = pairs.values
    ratio = float(values[0] / values[4]) if len(values) >= 5 and values[4] != 0 else None
    return HessianSpectrum(
        eigenvalues=values,
        error_bounds=pairs.errors,
        converged=pairs.converged,
        ratio=ratio,
        **_measured(hessian),
        vectors=[hessian.named(vector) for vector in pairs.vectors],
    )


@dataclass(frozen=True, kw_only=True)
class HessianTrace(HessianMeasurement):
    """trace = mean over probes of z'Hz; ``standard_error`` is the standard error of this mean."""

    trace: float
    standard_error: float
    probes: Array


def hessian_trace(
    objective: Objective,
    *,
    probes: int = 100,
    tolerance: float = 0.0,
    parameters: ParameterFilter = None,
    keep_graph: bool = False,
    seed: int = 0,
    on_product: Callable[[], None] = lambda: None,
) -> HessianTrace:
    """Hutchinson's estimate: E[z'Hz] = trace H for random signs z.

    Stops before ``probes`` when the standard error is at most ``tolerance`` times the estimate, but not before ten
    probes: the first two or three may agree by chance.
    """
    check_count("probes", probes, "fewer have no error estimate", least=2)
    hessian = HessianOperator(objective, parameters=parameters, keep_graph=keep_graph, on_product=on_product)
    generator = torch.Generator().manual_seed(seed)
    values: list[float] = []
    with hessian.measuring():
        while len(values) < probes:
            z = hessian.random_signs(generator)
            values.append(float(z @ (hessian @ z).double()))
            if len(values) >= 10 and _standard_error(values) <= tolerance * abs(float(np.mean(values))):
                break
    trace, error = float(np.mean(values)), _standard_error(values)
    return HessianTrace(trace=trace, standard_error=error, probes=np.array(values), **_measured(hessian))


def _measured(hessian: HessianOperator) -> dict[str, Any]:
    """Returns the fields shared by all results."""
    return {
        "products": hessian.products,
        "size": hessian.size,
        "parameters": list(hessian.parameters),
        "measured_on": hessian.objective.summary(),
        "notes": list(hessian.notes),
    }


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))


@dataclass(frozen=True, kw_only=True)
class SpectralDensity(HessianMeasurement):
    """The share of eigenvalues per unit length: ``density`` over ``grid``, integrating to 1.

    ``nodes`` and ``shares`` are the quadrature itself, one row per probe (rows may differ in length): the share
    of eigenvalues near a node. The density smooths the nodes with Gaussians of standard deviation ``width``.
    """

    grid: Array
    density: Array
    nodes: list[Array]
    shares: list[Array]
    width: float


def spectral_density(
    objective: Objective,
    *,
    steps: int = 80,
    probes: int = 4,
    points: int = 1000,
    width: float | None = None,
    parameters: ParameterFilter = None,
    keep_graph: bool = False,
    seed: int = 0,
    on_product: Callable[[], None] = lambda: None,
) -> SpectralDensity:
    """Stochastic Lanczos quadrature (Golub and Welsch; Ghorbani et al. 2019).

    For a random unit vector v, the nodes are the eigenvalues of the Lanczos matrix T and the shares the squared
    first components of its eigenvectors, so that sum shares * p(nodes) = v'p(H)v for polynomials up to degree
    2 * steps - 1. If the Krylov space is exhausted early, the shorter quadrature is already exact. ``width`` is 1 % of
    the range by default.
    """
    check_count("steps", steps, "80 are usual")
    check_count("probes", probes, "4 are usual")
    check_count("points", points, "1000 are usual", least=2)
    if width is not None and not width > 0:
        raise ValueError(f"width must be positive, got {width}; it is the Gaussians' standard deviation")
    hessian = HessianOperator(objective, parameters=parameters, keep_graph=keep_graph, on_product=on_product)
    generator = torch.Generator().manual_seed(seed)
    nodes, shares = [], []
    with hessian.measuring():
        for _ in range(probes):
            start = hessian.random_normal(generator)
            tridiagonal = lanczos(hessian.__matmul__, start, min(steps, hessian.size))
            values, vectors = np.linalg.eigh(tridiagonal)
            nodes.append(values)
            shares.append(vectors[0] ** 2)
    low, high = min(float(n.min()) for n in nodes), max(float(n.max()) for n in nodes)
    if width is None:
        width = 0.01 * (high - low) or 1e-3 * max(abs(high), 1e-12)
    grid = np.linspace(low - 5 * width, high + 5 * width, points)
    bells = np.exp(-(((grid[:, None] - np.concatenate(nodes)) / width) ** 2) / 2) / (width * math.sqrt(2 * math.pi))
    density = bells @ np.concatenate(shares) / probes
    return SpectralDensity(grid=grid, density=density, nodes=nodes, shares=shares, width=width, **_measured(hessian))


def hessian_diagonal(hessian: HessianOperator, *, probes: int | None = None, seed: int = 0) -> Array:
    """Returns the diagonal: exact, with one product per weight, or the mean of z ⊙ Hz over ``probes`` random signs."""
    if probes is not None:
        check_count("probes", probes, "None is the exact diagonal")
    total = torch.zeros(hessian.size, dtype=torch.float64, device=hessian.device)
    generator = torch.Generator().manual_seed(seed)
    with hessian.measuring():
        for index in range(probes or hessian.size):
            exact = probes is None
            z = one_hot(torch.tensor(index), hessian.size).to(total) if exact else hessian.random_signs(generator)
            total += z * (hessian @ z)
    return np.asarray((total / (probes or 1)).cpu().numpy())
