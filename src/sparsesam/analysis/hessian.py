"""The Hessian of a loss: products with vectors, eigenvalues, trace and spectral density.

Nothing here forms the matrix. A product is one double backward over the objective's batches,

    H v = sum_b share_b * grad_w <grad_w loss_b, v>,

and everything else is made of products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsesam.analysis.lanczos import Which, lanczos, top_eigenpairs
from sparsesam.analysis.objective import Objective, ParameterFilter, select_parameters
from sparsesam.analysis.results import Result

Array = npt.NDArray[np.float64]

_KINKED = (
    "Relu",
    "Threshold",
    "MaxPool",
    "Hardtanh",
    "Abs",
    "Hardswish",
    "Hardsigmoid",
    "Clamp",
    "L1Loss",
    "AdaptiveMax",
)


class Hessian:
    """The Hessian of an objective with respect to some of its model's parameters, as products with vectors.

    ``products`` counts them. Parameters that the loss does not depend on have rows and columns of zeros; frozen
    ones are left out unless a filter names them. ``keep_graph=True`` keeps every batch's first backward for the
    next product: about half the cost for several times the memory.

    >>> with hessian.measuring():
    ...     hv = hessian @ v
    """

    def __init__(self, objective: Objective, *, parameters: ParameterFilter = None, keep_graph: bool = False) -> None:
        self.objective = objective
        self.parameters = select_parameters(objective.model, parameters)
        self.tensors: list[Tensor] = list(self.parameters.values())
        self.size = sum(tensor.numel() for tensor in self.tensors)
        self.products = 0
        self.keep_graph = keep_graph
        self.notes: list[str] = []
        self._graphs: dict[int, list[Tensor | None]] = {}

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.tensors[0].dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """The model in the mode of measurement; products are possible only inside."""
        with self.objective.measuring(self.tensors):
            if not self.notes:
                self.notes = self._look()
            try:
                yield
            finally:
                self._graphs.clear()

    def __matmul__(self, vector: Tensor) -> Tensor:
        """H v for a flat vector; the result has the products' own dtype."""
        if vector.shape != (self.size,):
            raise ValueError(f"a vector must have shape ({self.size},), got {tuple(vector.shape)}")
        parts = self.split(vector.detach())
        total = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for index, share in enumerate(self.objective.weights):
            total.add_(self._product(index, parts), alpha=share)
        self.products += 1
        if not bool(total.isfinite().all()):
            raise ValueError(
                "a Hessian-vector product is not finite: the loss or its derivatives overflow at these weights "
                "(a square root or a norm at 0 is the usual cause)"
            )
        return total

    def split(self, vector: Tensor) -> list[Tensor]:
        """A flat vector as tensors of the parameters' shapes and dtypes."""
        parts = vector.split([tensor.numel() for tensor in self.tensors])
        return [part.view(tensor.shape).to(tensor) for part, tensor in zip(parts, self.tensors, strict=True)]

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """A flat vector as a direction, {name: tensor}."""
        return dict(zip(self.parameters, self.split(vector), strict=True))

    def random_vector(self, generator: torch.Generator, kind: Literal["normal", "signs"]) -> Tensor:
        """Drawn on the CPU, so that every device gets the same."""
        if kind == "normal":
            vector = torch.randn(self.size, generator=generator, dtype=torch.float64)
        else:
            vector = torch.randint(0, 2, (self.size,), generator=generator).double() * 2 - 1
        return vector.to(self.device)

    def _gradient(self, index: int) -> list[Tensor | None]:
        if index in self._graphs:
            return self._graphs[index]
        loss = self.objective.batch_loss(index)
        if not loss.requires_grad:
            return [None] * len(self.tensors)
        gradient: list[Tensor | None] = list(
            torch.autograd.grad(loss, self.tensors, create_graph=True, allow_unused=True)
        )
        if self.keep_graph:
            self._graphs[index] = gradient
        return gradient

    def _product(self, index: int, parts: Sequence[Tensor]) -> Tensor:
        gradient = self._gradient(index)
        pairs = [(g, v) for g, v in zip(gradient, parts, strict=True) if g is not None and g.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(self.tensors)
        if pairs:
            ends, starts = zip(*pairs, strict=True)
            found = torch.autograd.grad(ends, self.tensors, starts, retain_graph=self.keep_graph, allow_unused=True)
        zeros = (
            torch.zeros_like(tensor) if part is None else part for part, tensor in zip(found, self.tensors, strict=True)
        )
        return torch.cat([(part.to_dense() if part.is_sparse else part).reshape(-1).to(self.dtype) for part in zeros])

    def _look(self) -> list[str]:
        """What a reader must know about this Hessian."""
        loss = self.objective.batch_loss(0)
        gradient = (
            torch.autograd.grad(loss, self.tensors, allow_unused=True, retain_graph=True)
            if loss.requires_grad
            else [None] * len(self.tensors)
        )
        unused = [name for name, part in zip(self.parameters, gradient, strict=True) if part is None]
        notes = []
        if unused:
            notes.append(f"the loss does not depend on {', '.join(unused)}: zero rows")
        kinks = sorted(_kinks(loss))
        if kinks:
            notes.append(
                f"not smooth ({', '.join(kinks)}): the Hessian is that of the smooth piece the weights are in, "
                "and does not see the kinks between pieces"
            )
        return notes


@dataclass(frozen=True)
class HessianSpectrum(Result):
    """Largest eigenvalues first. ``error_bounds`` are estimates of |computed - true|, by the residuals.

    ``ratio`` is lambda_1 / lambda_5, the paper's measure; None when fewer than five were asked for.
    ``vectors`` are unit eigenvectors as directions, and are not part of `to_dict`.
    """

    eigenvalues: Array
    error_bounds: Array
    converged: bool
    ratio: float | None
    which: Which
    products: int
    size: int
    parameters: list[str]
    measured_on: dict[str, Any]
    notes: list[str]
    vectors: list[dict[str, Tensor]] = field(repr=False, metadata={"plain": False})


def hessian_eigenvalues(
    objective: Objective,
    count: int = 5,
    *,
    which: Which = "largest",
    tolerance: float = 1e-3,
    max_products: int = 1000,
    max_basis: int = 64,
    parameters: ParameterFilter = None,
    keep_graph: bool = False,
    seed: int = 0,
) -> HessianSpectrum:
    """The ``count`` eigenvalues that are "largest", "smallest" or largest in "magnitude", to relative ``tolerance``.

    Lanczos with full reorthogonalisation from one random vector, thickly restarted only when ``max_basis``
    vectors are held, until every residual is below 0.3 * tolerance * |eigenvalue|. Of a multiple eigenvalue one copy
    is seen, as in any Krylov method with one start vector, and of several very close ones possibly too few.
    """
    hessian = Hessian(objective, parameters=parameters, keep_graph=keep_graph)
    if not 1 <= count <= hessian.size:
        raise ValueError(f"count must be between 1 and the number of weights, {hessian.size}, got {count}")
    generator = torch.Generator().manual_seed(seed)
    with hessian.measuring():
        pairs = top_eigenpairs(
            hessian.__matmul__,
            hessian.random_vector(generator, "normal"),
            count,
            which=which,
            tolerance=tolerance,
            max_products=max_products,
            max_basis=max_basis,
            storage=hessian.dtype,
        )
    notes = list(hessian.notes)
    if not pairs.converged:
        notes.append(f"not converged to {tolerance} within {hessian.products} products: raise max_products")
    values = pairs.values
    ratio = float(values[0] / values[4]) if count >= 5 and which == "largest" and values[4] != 0 else None
    return HessianSpectrum(
        eigenvalues=values,
        error_bounds=pairs.errors,
        converged=pairs.converged,
        ratio=ratio,
        which=which,
        products=hessian.products,
        size=hessian.size,
        parameters=list(hessian.parameters),
        measured_on=objective.describe(),
        notes=notes,
        vectors=[hessian.named(vector) for vector in pairs.vectors],
    )


@dataclass(frozen=True)
class HessianTrace(Result):
    """trace = mean over probes of z'Hz; ``standard_error`` is that of this mean."""

    trace: float
    standard_error: float
    probes: Array
    products: int
    size: int
    parameters: list[str]
    measured_on: dict[str, Any]
    notes: list[str]


def hessian_trace(
    objective: Objective,
    *,
    probes: int = 100,
    tolerance: float = 0.0,
    parameters: ParameterFilter = None,
    keep_graph: bool = False,
    seed: int = 0,
) -> HessianTrace:
    """Hutchinson's estimate: E[z'Hz] = trace H for random signs z.

    It stops before ``probes`` when the standard error is at most ``tolerance`` times the estimate (from ten
    probes on: an early agreement of two or three is chance).
    """
    if probes < 2:
        raise ValueError(f"probes must be at least 2, got {probes}; fewer have no error estimate")
    hessian = Hessian(objective, parameters=parameters, keep_graph=keep_graph)
    generator = torch.Generator().manual_seed(seed)
    values: list[float] = []
    with hessian.measuring():
        while len(values) < probes:
            z = hessian.random_vector(generator, "signs")
            values.append(float(z @ (hessian @ z).double()))
            if len(values) >= 10 and _standard_error(values) <= tolerance * abs(float(np.mean(values))):
                break
    return HessianTrace(
        trace=float(np.mean(values)),
        standard_error=_standard_error(values),
        probes=np.array(values),
        products=hessian.products,
        size=hessian.size,
        parameters=list(hessian.parameters),
        measured_on=objective.describe(),
        notes=list(hessian.notes),
    )


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))


@dataclass(frozen=True)
class SpectralDensity(Result):
    """The share of eigenvalues per unit length: ``density`` over ``grid``, integrating to 1.

    ``nodes`` and ``shares`` are the quadrature itself, one row per probe (rows may differ in length): the share
    of eigenvalues near a node. The density is the nodes under Gaussians of standard deviation ``width``.
    """

    grid: Array
    density: Array
    nodes: list[Array]
    shares: list[Array]
    width: float
    products: int
    size: int
    parameters: list[str]
    measured_on: dict[str, Any]
    notes: list[str]

    def moment(self, power: int) -> float:
        """The mean of lambda^power over the eigenvalues; the first, times ``size``, estimates the trace."""
        each = [float(shares @ nodes**power) for nodes, shares in zip(self.nodes, self.shares, strict=True)]
        return float(np.mean(each))


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
) -> SpectralDensity:
    """Stochastic Lanczos quadrature (Golub and Welsch; Ghorbani et al. 2019).

    For a random unit vector v, the nodes are the eigenvalues of the Lanczos matrix T and the shares the squared
    first components of its eigenvectors, so that sum shares * p(nodes) = v'p(H)v for polynomials up to degree
    2 * steps - 1. Where Krylov space ends early, the shorter quadrature is exact already. ``width`` is 1 % of
    the range by default.
    """
    if steps < 1 or probes < 1 or points < 2:
        raise ValueError(f"steps, probes and points must be positive, got {steps}, {probes} and {points}")
    if width is not None and not width > 0:
        raise ValueError(f"width must be positive, got {width}; it is the Gaussians' standard deviation")
    hessian = Hessian(objective, parameters=parameters, keep_graph=keep_graph)
    generator = torch.Generator().manual_seed(seed)
    nodes, shares = [], []
    with hessian.measuring():
        for _ in range(probes):
            start = hessian.random_vector(generator, "normal")
            tridiagonal = lanczos(hessian.__matmul__, start, min(steps, hessian.size), storage=hessian.dtype)
            values, vectors = np.linalg.eigh(tridiagonal)
            nodes.append(values)
            shares.append(vectors[0] ** 2)
    low, high = min(float(n.min()) for n in nodes), max(float(n.max()) for n in nodes)
    if width is None:
        width = 0.01 * (high - low) or 1e-3 * max(abs(high), 1e-12)
    grid = np.linspace(low - 5 * width, high + 5 * width, points)
    return SpectralDensity(
        grid=grid,
        density=_smoothed(grid, nodes, shares, width),
        nodes=nodes,
        shares=shares,
        width=width,
        products=hessian.products,
        size=hessian.size,
        parameters=list(hessian.parameters),
        measured_on=objective.describe(),
        notes=list(hessian.notes),
    )


def _smoothed(grid: Array, nodes: Sequence[Array], shares: Sequence[Array], width: float) -> Array:
    total = np.zeros_like(grid)
    for values, weights in zip(nodes, shares, strict=True):
        bells = np.exp(-(((grid[:, None] - values) / width) ** 2) / 2) / (width * math.sqrt(2 * math.pi))
        total += bells @ weights
    return total / len(nodes)


def hessian_diagonal(hessian: Hessian, *, probes: int | None = None, seed: int = 0) -> Array:
    """The diagonal: exactly, by one product per weight, or as the mean of z ⊙ Hz over ``probes`` random signs."""
    if probes is not None and probes < 1:
        raise ValueError(f"probes must be at least 1, or None for the exact diagonal, got {probes}")
    diagonal = torch.zeros(hessian.size, dtype=torch.float64, device=hessian.device)
    generator = torch.Generator().manual_seed(seed)
    with hessian.measuring():
        if probes is None:
            basis = torch.zeros(hessian.size, dtype=hessian.dtype, device=hessian.device)
            for index in range(hessian.size):
                basis[index] = 1
                diagonal[index] = (hessian @ basis)[index]
                basis[index] = 0
        else:
            for _ in range(probes):
                z = hessian.random_vector(generator, "signs")
                diagonal += z * (hessian @ z) / probes
    return np.asarray(diagonal.cpu().numpy())


def _kinks(loss: Tensor) -> set[str]:
    """Names of the loss's operations whose derivative jumps, found in its graph."""
    found: set[str] = set()
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name().removesuffix("0").removesuffix("Backward")
        if any(kinked.lower() in name.lower() for kinked in _KINKED):
            found.add(name)
        waiting.extend(parent for parent, _ in node.next_functions)
    return found
