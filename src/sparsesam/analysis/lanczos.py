"""Lanczos' method for a symmetric operator given by its products, with full reorthogonalization.

Sums and coefficients are float64. The basis is kept in float64 too while that needs at most one gibibyte, and in the
products' own dtype beyond, which is as exact as the products are.

Why not SciPy's eigsh: it needs 21 products for five eigenvalues to 1e-3 where this needs 13 to 17 (python -m
benchmarks.hessian), runs on the CPU only, and would be a dependency of the core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsesam.masks.checks import check_choice

Which = Literal["largest", "smallest", "magnitude"]
Product = Callable[[Tensor], Tensor]
Array = npt.NDArray[np.float64]

_SPACE = 1 << 30  # bytes
_NEGLIGIBLE = 1e-6
_STRICTER = 0.3
_CHUNK = 1 << 22  # entries converted to float64 at a time


@dataclass(frozen=True)
class Eigenpairs:
    values: Array
    errors: Array
    vectors: list[Tensor]
    converged: bool


def top_eigenpairs(
    product: Product,
    start: Tensor,
    count: int,
    *,
    which: Which,
    tolerance: float,
    max_products: int = 1000,
    max_basis: int = 64,
    storage: torch.dtype = torch.float64,
) -> Eigenpairs:
    """The requested end of the spectrum by thick-restart Lanczos (Wu and Simon 2000).

    A Ritz value theta with residual r is wrong by at most r, and by about r² / gap where the gap to the other
    Ritz values is larger than r. The latter could stop sooner, but then one Ritz value may still represent two
    close eigenvalues; it stops when r is at most 0.3 * tolerance * |theta| for all requested ones, which on random
    spectra missed an eigenvalue about as rarely as ARPACK at the same tolerance, with fewer products. Values
    below a millionth of the largest count as zero.
    """
    check_choice("which", which, get_args(Which))
    size = len(start)
    most = min(max(max_basis, 2 * count + 2), size)
    basis = _Basis(most + 1, start, storage)
    projected = np.zeros((most, most))
    products = 0
    while True:
        step = basis.count - 1
        image = product(basis.last()).double()
        products += 1
        coefficients, length = basis.extend(image)
        projected[: step + 1, step] = projected[step, : step + 1] = coefficients
        scale = float(np.abs(projected).max())
        ended = length <= 1e-12 * scale or step + 1 == size
        ritz, mixing = np.linalg.eigh(projected[: step + 1, : step + 1])
        order = _order(ritz, which)
        residuals = np.zeros(len(ritz)) if ended else np.abs(length * mixing[-1])
        errors = _errors(ritz, residuals)
        wanted = order[:count]
        good = len(wanted) == count and bool(
            np.all(residuals[wanted] <= _STRICTER * tolerance * np.maximum(np.abs(ritz[wanted]), _NEGLIGIBLE * scale))
        )
        if ended and len(wanted) < count and products < max_products:
            # An invariant subspace with fewer eigenvalues than requested: continue in its complement.
            if basis.refresh(step + 1):
                continue
        if ended or good or products >= max_products:
            vectors = [basis.combine(mixing[:, index]) for index in wanted]
            return Eigenpairs(ritz[wanted], errors[wanted], vectors, good or ended)
        if step + 1 == most:
            kept = order[: min(count + (most - count) // 2, most - 1)]
            basis.restart(mixing[:, kept])
            projected[:] = 0
            projected[range(len(kept)), range(len(kept))] = ritz[kept]


def lanczos(product: Product, start: Tensor, steps: int, *, storage: torch.dtype = torch.float64) -> Array:
    """The tridiagonal Lanczos matrix, (m, m) with m = steps, or smaller if the Krylov space is exhausted."""
    basis = _Basis(steps + 1, start, storage)
    diagonal: list[float] = []
    beside: list[float] = []
    scale = 0.0
    for _ in range(steps):
        coefficients, length = basis.extend(product(basis.last()).double())
        diagonal.append(float(coefficients[-1]))
        scale = max(scale, abs(diagonal[-1]), length)
        if length <= 1e-12 * scale:
            break
        beside.append(length)
    size = len(diagonal)
    return np.diag(diagonal) + np.diag(beside[: size - 1], 1) + np.diag(beside[: size - 1], -1)


def _order(ritz: Array, which: Which) -> npt.NDArray[np.intp]:
    if which == "largest":
        return np.argsort(-ritz)
    return np.argsort(ritz) if which == "smallest" else np.argsort(-np.abs(ritz))


def _errors(ritz: Array, residuals: Array) -> Array:
    """min(r, r² / gap), the gap being the distance to the nearest other Ritz value less its residual."""
    if len(ritz) == 1:
        return residuals.copy()
    distances = np.abs(ritz[:, None] - ritz) - residuals
    np.fill_diagonal(distances, np.inf)
    gaps = np.maximum(distances.min(axis=1), 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        squared = np.where(residuals > 0, residuals**2 / gaps, 0.0)
    return np.minimum(residuals, squared)


class _Basis:
    """Orthonormal vectors, row by row; the operator is applied to the last one next."""

    def __init__(self, room: int, start: Tensor, storage: torch.dtype) -> None:
        dtype = torch.float64 if room * len(start) * 8 <= _SPACE else storage
        self._rows = torch.empty(room, len(start), dtype=dtype, device=start.device)
        self._generator = torch.Generator().manual_seed(len(start))
        length = torch.linalg.vector_norm(start.double())
        if not float(length) > 0:
            raise ValueError("the start vector must not be zero")
        self._rows[0] = start.double() / length
        self.count = 1

    def last(self) -> Tensor:
        return self._rows[self.count - 1]

    def extend(self, image: Tensor) -> tuple[Array, float]:
        """Orthogonalize a float64 vector, in place, against all rows and append it.

        Returns its coefficients and the length of the remainder; nothing is appended when that is zero.
        """
        coefficients = torch.zeros(self.count, dtype=torch.float64, device=image.device)
        for _ in range(2):  # the first pass leaves rounding errors; twice is enough
            coefficients += self._project_out(image)
        length = float(torch.linalg.vector_norm(image))
        if length > 0 and self.count < len(self._rows):
            self._rows[self.count] = image / length
            self.count += 1
        return coefficients.cpu().numpy(), length

    def refresh(self, count: int) -> bool:
        """Append a new random direction, orthogonal to the first ``count`` rows."""
        if count >= len(self._rows):
            return False
        self.count = count
        vector = torch.randn(self._rows.shape[1], generator=self._generator, dtype=torch.float64).to(self._rows.device)
        _, length = self.extend(vector)
        return length > 0

    def combine(self, mixing: Array) -> Tensor:
        """The combination of the first rows, in float64 sums."""
        total = torch.zeros(self._rows.shape[1], dtype=torch.float64, device=self._rows.device)
        for weight, row in zip(mixing.tolist(), self._rows[: len(mixing)], strict=True):
            total.add_(row, alpha=weight)
        return total

    def restart(self, mixing: Array) -> None:
        """Keep only the combinations given as columns, and the last row."""
        last = self.last().clone()
        weights = torch.from_numpy(mixing.T.copy()).to(self._rows.device)
        rows = self._rows[: len(mixing)]
        for columns in _chunks(rows.shape[1], max(1, _CHUNK // len(rows))):
            rows[: len(weights), columns] = (weights @ rows[:, columns].double()).to(rows.dtype)
        self.count = len(weights) + 1
        self._rows[self.count - 1] = last

    def _project_out(self, image: Tensor) -> Tensor:
        rows = self._rows[: self.count]
        coefficients = torch.zeros(self.count, dtype=torch.float64, device=image.device)
        chunks = list(_chunks(len(image), max(1, _CHUNK // self.count)))
        for columns in chunks:
            coefficients += rows[:, columns].double() @ image[columns]
        for columns in chunks:
            image[columns] -= coefficients @ rows[:, columns].double()
        return coefficients


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
