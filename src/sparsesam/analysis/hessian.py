"""Eigenvalues, trace, spectral density and diagonal of the Hessian, from Hessian-vector products only.

The matrix is never formed. A product is one double backward over the objective's batches,

    H v = sum_b share_b * grad_w <grad_w loss_b, v>.

With ReLU, max pooling and other operations that are not smooth, it is the Hessian of the smooth piece at the current
weights, without the kinks between pieces.

Eigenvalues and densities come from the Lanczos method with full reorthogonalization. SciPy's eigsh needs 21 products
for five eigenvalues to 1e-3 where this needs 13 to 17, and would be a dependency of the core (python -m benchmarks
hessian).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from sparsesam.analysis.objective import Objective, ParameterFilter, select_parameters
from sparsesam.analysis.results import Array, Measurement
from sparsesam.utils.checks import check_count


class HessianOperator:
    """The Hessian of an objective with respect to some of its model's parameters, as a linear operator.

    ``products`` counts the products since `measuring` began; ``on_product`` is called after each. Frozen parameters are
    left out unless a filter names them. ``keep_graph=True`` keeps the graph of every batch's first backward for the
    next product: about half the cost for several times the memory.

        with hessian.measuring():
            hv = hessian @ v
    """

    def __init__(
        self,
        objective: Objective,
        *,
        parameters: ParameterFilter = None,
        keep_graph: bool = False,
        on_product: Callable[[], None] = lambda: None,
    ) -> None:
        self.objective = objective
        self.parameters = select_parameters(objective.model, parameters)
        self.tensors: list[Tensor] = list(self.parameters.values())
        self.size = sum(tensor.numel() for tensor in self.tensors)
        self.dtype = torch.promote_types(self.tensors[0].dtype, torch.float32)
        self.device = self.tensors[0].device
        self.products, self.on_product, self.keep_graph = 0, on_product, keep_graph
        self._graphs: dict[int, Sequence[Tensor]] = {}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Prepare the model for measuring; products are possible only inside this context."""
        with self.objective.measuring(self.tensors):
            self.products = 0
            try:
                yield
            finally:
                self._graphs.clear()

    def __matmul__(self, vector: Tensor) -> Tensor:
        """Returns H v for a flat vector, in the operator's own dtype."""
        parts = self.split(vector.detach())
        total = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for index, share in enumerate(self.objective.weights):
            total.add_(self._product(index, parts), alpha=share)
        self.products += 1
        self.on_product()
        if not bool(total.isfinite().all()):
            raise ValueError("a Hessian-vector product is not finite; a square root or norm at 0 is the usual cause")
        return total

    def split(self, vector: Tensor) -> list[Tensor]:
        """Split a flat vector into tensors of the parameters' shapes and dtypes."""
        parts = vector.split([tensor.numel() for tensor in self.tensors])
        return [part.view(tensor.shape).to(tensor) for part, tensor in zip(parts, self.tensors, strict=True)]

    def random_normal(self, generator: torch.Generator) -> Tensor:
        """Draws on the CPU, so that every device gets the same numbers; so does `random_signs`."""
        return torch.randn(self.size, generator=generator, dtype=torch.float64).to(self.device)

    def random_signs(self, generator: torch.Generator) -> Tensor:
        return (torch.randint(0, 2, (self.size,), generator=generator).double() * 2 - 1).to(self.device)

    def measured(self, *notes: str) -> dict[str, Any]:
        """Returns the fields of a `HessianMeasurement`."""
        own = {"products": self.products, "size": self.size, "parameters": list(self.parameters)}
        return own | self.objective.measured(*notes)

    def _product(self, index: int, vector: Sequence[Tensor]) -> Tensor:
        gradient: Sequence[Tensor] | None = self._graphs.get(index)
        if gradient is None:
            loss, gradient = self.objective.batch_loss(index), ()
            if loss.requires_grad:
                gradient = torch.autograd.grad(loss, self.tensors, create_graph=True, materialize_grads=True)
        if self.keep_graph:
            self._graphs[index] = gradient
        pairs = [(g, v) for g, v in zip(gradient, vector, strict=False) if g.requires_grad]
        if not pairs:
            return torch.zeros(self.size, dtype=self.dtype, device=self.device)
        gradient, vector = zip(*pairs, strict=True)
        product = torch.autograd.grad(
            gradient, self.tensors, vector, retain_graph=self.keep_graph, materialize_grads=True
        )
        return torch.cat([part.to_dense().reshape(-1).to(self.dtype) for part in product])


def operator_of(hessian: HessianOperator | Objective) -> HessianOperator:
    """Returns the operator itself, or that of all trained parameters of an objective."""
    return HessianOperator(hessian) if isinstance(hessian, Objective) else hessian


@dataclass(frozen=True, kw_only=True)
class HessianMeasurement(Measurement):
    """Covers ``size`` weights in ``parameters``; took ``products`` Hessian-vector products."""

    products: int
    size: int
    parameters: list[str]


@dataclass(frozen=True, kw_only=True)
class HessianSpectrum(HessianMeasurement):
    """The largest eigenvalues in descending order. ``error_bounds`` are the residuals: |computed - true| is not larger.

    ``ratio`` is lambda_1 / lambda_5, the paper's measure; None when fewer than five were requested.
    ``vectors`` are unit eigenvectors as directions, {name: tensor}, and are not part of `to_dict`.
    """

    eigenvalues: Array
    error_bounds: Array
    converged: bool
    ratio: float | None
    vectors: list[dict[str, Tensor]] = field(repr=False, default_factory=list, metadata={"stored": False})


def hessian_eigenvalues(
    hessian: HessianOperator | Objective,
    count: int = 5,
    *,
    tolerance: float = 1e-3,
    max_products: int = 200,
    seed: int = 0,
) -> HessianSpectrum:
    """Compute the ``count`` largest eigenvalues to relative ``tolerance``.

    The Lanczos method keeps as many vectors as it takes products. As in any Krylov method with one start vector, only
    one copy of a multiple eigenvalue is found, and some of several very close ones may be missed.
    """
    hessian = operator_of(hessian)
    if not 1 <= count <= hessian.size:
        raise ValueError(f"count must be between 1 and the number of weights, {hessian.size}, got {count}")
    start = hessian.random_normal(torch.Generator().manual_seed(seed))
    with hessian.measuring():
        for space in lanczos(hessian, start):
            basis, projected, remainder = space
            ritz, mixing = np.linalg.eigh(projected)
            wanted = np.argsort(-ritz)[:count]
            values, residuals = ritz[wanted], np.abs(remainder * mixing[-1, wanted])
            # On random spectra, 0.3 of the tolerance missed an eigenvalue about as rarely as ARPACK at the same
            # tolerance, with fewer products. Values below a millionth of the largest count as zero.
            allowed = 0.3 * tolerance * np.maximum(np.abs(values), 1e-6 * np.abs(projected).max())
            converged = len(values) == count and bool((residuals <= allowed).all())
            if converged or hessian.products >= max_products:
                break
    vectors = []
    for column in mixing.T[wanted].tolist():
        vector = torch.zeros_like(start)
        for weight, member in zip(column, basis, strict=True):
            vector.add_(member, alpha=weight)
        vectors.append(dict(zip(hessian.parameters, hessian.split(vector), strict=True)))
    late = f"not converged to {tolerance} within {hessian.products} products: raise max_products"
    return HessianSpectrum(
        eigenvalues=values,
        error_bounds=residuals,
        converged=converged,
        ratio=float(values[0] / values[4]) if len(values) >= 5 and values[4] != 0 else None,
        vectors=vectors,
        **hessian.measured(*([] if converged else [late])),
    )


@dataclass(frozen=True, kw_only=True)
class HessianTrace(HessianMeasurement):
    """trace = mean over probes of z'Hz; ``standard_error`` is the standard error of this mean."""

    trace: float
    standard_error: float
    probes: Array


def hessian_trace(
    hessian: HessianOperator | Objective, *, probes: int = 100, tolerance: float = 0.0, seed: int = 0
) -> HessianTrace:
    """Hutchinson's estimate: E[z'Hz] = trace H for random signs z.

    Stops before ``probes`` when the standard error is at most ``tolerance`` times the estimate, but not before ten
    probes: the first two or three may agree by chance.
    """
    check_count("probes", probes, "fewer have no error estimate", least=2)
    hessian, generator = operator_of(hessian), torch.Generator().manual_seed(seed)
    values: list[float] = []
    trace = error = math.nan
    with hessian.measuring():
        while len(values) < probes and not (len(values) >= 10 and error <= tolerance * abs(trace)):
            z = hessian.random_signs(generator)
            values.append(float(z @ (hessian @ z).double()))
            if len(values) > 1:
                trace, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return HessianTrace(trace=trace, standard_error=error, probes=np.array(values), **hessian.measured())


@dataclass(frozen=True, kw_only=True)
class SpectralDensity(HessianMeasurement):
    """The share of eigenvalues per unit length: ``density`` over ``grid``, integrating to 1.

    ``nodes`` and ``shares`` are the quadrature itself, one row per probe: the share of eigenvalues near a node. The
    density smooths the nodes with Gaussians of standard deviation ``width``.
    """

    grid: Array
    density: Array
    nodes: list[Array]
    shares: list[Array]
    width: float


def spectral_density(
    hessian: HessianOperator | Objective,
    *,
    steps: int = 80,
    probes: int = 4,
    points: int = 1000,
    width: float | None = None,
    seed: int = 0,
) -> SpectralDensity:
    """Stochastic Lanczos quadrature (Golub and Welsch; Ghorbani et al. 2019).

    For a random unit vector v, the nodes are the eigenvalues of the Lanczos matrix T and the shares the squared
    first components of its eigenvectors, so that sum shares * p(nodes) = v'p(H)v for polynomials up to degree
    2 * steps - 1. ``width`` is 1 % of the range by default.
    """
    check_count("steps", steps, "80 are usual")
    check_count("probes", probes, "4 are usual")
    check_count("points", points, "1000 are usual", least=2)
    if width is not None and not width > 0:
        raise ValueError(f"width must be positive, got {width}; it is the Gaussians' standard deviation")
    hessian, generator = operator_of(hessian), torch.Generator().manual_seed(seed)
    nodes, shares = [], []
    with hessian.measuring():
        for _ in range(probes):
            spaces = lanczos(hessian, hessian.random_normal(generator))
            projected = next(matrix for basis, matrix, left in spaces if len(basis) == steps or left == 0)
            values, vectors = np.linalg.eigh(projected)
            nodes.append(values)
            shares.append(vectors[0] ** 2)
    every = np.concatenate(nodes)
    low, high = float(every.min()), float(every.max())
    if width is None:
        width = 0.01 * (high - low) or 1e-3 * max(abs(high), 1e-12)
    grid = np.linspace(low - 5 * width, high + 5 * width, points)
    bells = np.exp(-(((grid[:, None] - every) / width) ** 2) / 2) / (width * math.sqrt(2 * math.pi))
    density = bells @ np.concatenate(shares) / probes
    return SpectralDensity(grid=grid, density=density, nodes=nodes, shares=shares, width=width, **hessian.measured())


def hessian_diagonal(hessian: HessianOperator | Objective, *, probes: int | None = None, seed: int = 0) -> Array:
    """Returns the diagonal: exact, with one product per weight, or the mean of z ⊙ Hz over ``probes`` random signs."""
    if probes is not None:
        check_count("probes", probes, "None is the exact diagonal")
    hessian, generator = operator_of(hessian), torch.Generator().manual_seed(seed)
    total = torch.zeros(hessian.size, dtype=torch.float64, device=hessian.device)
    with hessian.measuring():
        for index in range(probes or hessian.size):
            exact = probes is None
            z = one_hot(torch.tensor(index), hessian.size).to(total) if exact else hessian.random_signs(generator)
            total += z * (hessian @ z)
    return np.asarray((total / (probes or 1)).cpu().numpy())


# ---- the Lanczos method


def lanczos(hessian: HessianOperator, start: Tensor) -> Iterator[tuple[list[Tensor], Array, float]]:
    """Yield after each product an orthonormal basis of span{v, Hv, H²v, …}, H in that basis, and the norm of the last
    product's component outside of that space: 0 if the space is invariant.

    An invariant space is continued with a random vector orthogonal to it. Sums and coefficients are float64; the basis
    is stored in the dtype of the products.
    """
    generator = torch.Generator().manual_seed(len(start))
    basis, projected = [start / torch.linalg.vector_norm(start)], np.zeros((0, 0))
    while len(projected) < len(start):
        image = hessian @ basis[-1]
        vector, dtype = image.double(), image.dtype
        coefficients = _orthogonalize(vector, basis)
        projected = np.pad(projected, (0, 1))
        projected[:, -1] = projected[-1] = coefficients
        remainder = float(torch.linalg.vector_norm(vector))
        is_invariant = remainder <= 1e-12 * np.abs(projected).max() or len(projected) == len(start)
        yield basis, projected, 0.0 if is_invariant else remainder
        if is_invariant:
            vector = torch.randn(len(start), generator=generator, dtype=torch.float64).to(start.device)
            _orthogonalize(vector, basis)
        basis.append((vector / torch.linalg.vector_norm(vector)).to(dtype))


def _orthogonalize(vector: Tensor, basis: list[Tensor]) -> Array:
    """Orthogonalize in place against all basis vectors; returns the coefficients."""
    total = np.zeros(len(basis))
    for _ in range(2):  # the first pass leaves rounding errors; twice is enough
        coefficients = torch.stack([member.double() @ vector for member in basis]).tolist()
        for coefficient, member in zip(coefficients, basis, strict=True):
            vector.add_(member, alpha=-coefficient)
        total += coefficients
    return total
