"""Theorems 1 and 2 compared with measured runs: constants, curves, and whether the assumptions hold.

    1/T sum_t E||∇f(w_t)||² <= C_1 / sqrt(T) + C_2 log T / sqrt(T)        eta_t = eta_0 / sqrt(t)
                                                                         rho_t = rho_0 / sqrt(t)
    SAM    C_1 = 2 / eta_0 (f(w_0) - E f(w_T))                             C_2 = 2 (L sigma² eta_0 + L G rho_0)
    SSAM   C_3 = 2 / eta_0 (f(w_0) - E f(w_T) + L³ eta_0² rho_0² π² / 6)    C_4 = C_2

The proofs bound sum_{t<=T} 1/t by log T, which is too small: the sum is at most 1 + log T, and at T = 1 it is 1 while
log T is 0. With the harmonic number itself in place of log T the proofs hold, so both curves are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import hessian

from sparsesam.analysis.results import AnalysisResult, Array
from sparsesam.masks.mask import random_mask
from sparsesam.sam import SSAM
from sparsesam.schedules import InverseSqrt
from sparsesam.utils.checks import check_choice, check_count


@dataclass(frozen=True)
class SmoothProblem:
    """A function f of a vector, minimized from ``start``, with ||Hessian|| <= ``L`` and ||∇f|| <= ``G``."""

    f: Callable[[Tensor], Tensor]
    start: Tensor
    L: float
    G: float


def nonconvex_logistic(*, samples: int = 200, size: int = 20, seed: int = 0) -> SmoothProblem:
    """f(w) = mean log(1 + exp(-y x·w)) + 0.1 sum w² / (1 + w²): smooth, not convex, gradient bounded.

    L <= ||X||² / (4 samples) + 0.2 and G <= mean ||x|| + 0.1 sqrt(size) * 3 sqrt(3) / 8 everywhere.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, size, generator=generator, dtype=torch.float64)
    truth = torch.randn(size, generator=generator, dtype=torch.float64)
    y = torch.sign(x @ truth + torch.randn(samples, generator=generator, dtype=torch.float64))
    start = 2 * torch.randn(size, generator=generator, dtype=torch.float64)

    def f(w: Tensor) -> Tensor:
        return nn.functional.softplus(-y * (x @ w)).mean() + 0.1 * (w.square() / (1 + w.square())).sum()

    smooth = float(torch.linalg.matrix_norm(x, 2)) ** 2 / (4 * samples) + 0.2
    gradient = float(x.norm(dim=1).mean()) + 0.1 * math.sqrt(size) * 3 * math.sqrt(3) / 8
    return SmoothProblem(f, start, smooth, gradient)


@dataclass(frozen=True)
class Convergence(AnalysisResult):
    """``measured`` and ``deviation``: mean and standard deviation over the runs of 1/T sum_{t<=T} ||∇f(w_t)||², at
    ``T``. ``bound`` is the theorem's right-hand side as printed, ``bound_harmonic`` has sum 1/t in place of log T.

    ``constant`` and ``log_constant`` are the factors of 1 / sqrt(T) and log T / sqrt(T) at the last T: C_1 and C_2 for
    SAM, C_3 and C_4 for SSAM. ``assumptions`` has both sides of each condition of the theorem, the left ones as
    observed along the runs. ``slope`` is the slope of log measured against log T over the second half of the points; it
    is about -0.5 for O(log T / sqrt T).
    """

    method: str
    T: npt.NDArray[np.int64]
    measured: Array
    deviation: Array
    bound: Array
    bound_harmonic: Array
    constant: float
    log_constant: float
    assumptions: dict[str, list[float]]
    slope: float
    notes: list[str]

    @property
    def violated(self) -> list[str]:
        """The conditions that do not hold: the theorem does not apply to these runs."""
        return [text for text, (left, right) in self.assumptions.items() if left > right * (1 + 1e-9)]


def measure_convergence(
    method: Literal["SAM", "SSAM"] = "SAM",
    *,
    problem: SmoothProblem | None = None,
    steps: int = 1000,
    runs: int = 4,
    eta_0: float | None = None,
    rho_0: float | None = None,
    sigma: float = 0.5,
    sparsity: float = 0.5,
    seed: int = 0,
) -> Convergence:
    """Run SAM or SSAM on a smooth non-convex problem and compare it with the theorem's bound.

    The stochastic gradient is ∇f(w) + xi with xi drawn in each step, Gaussian with E||xi||² = sigma², and the
    same in both passes of a step: the gradient of f(w) + <xi, w>, as smooth as f. The problem is `nonconvex_logistic`
    by default, eta_0 is 1 / L and rho_0 the largest value that the theorem allows. SSAM perturbs a fixed random half
    (``sparsity``) of the weights.

    The condition eta_0 <= 1 / L is from the lemmas; the theorems in the main text omit it.
    """
    check_choice("method", method, ("SAM", "SSAM"))
    check_count("steps", steps, "the bound is on a mean over steps", least=2)
    check_count("runs", runs, "the expectation is estimated by their mean")
    if sigma < 0:
        raise ValueError(f"sigma must be at least 0, got {sigma}; 0 is the exact gradient")
    problem = problem or nonconvex_logistic()
    L, G, divisor = problem.L, problem.G, 2 if method == "SAM" else 5
    sparsity = 0.0 if method == "SAM" else sparsity
    eta_0 = 1 / L if eta_0 is None else eta_0
    rho_0 = G * eta_0 / divisor if rho_0 is None else rho_0
    if not (eta_0 > 0 and rho_0 >= 0):
        raise ValueError(f"eta_0 must be positive and rho_0 at least 0, got {eta_0} and {rho_0}")
    found = [_run(problem, steps, eta_0, rho_0, sigma, sparsity, seed + run) for run in range(runs)]
    squared, losses, curvatures, noises = (np.array(parts) for parts in zip(*found, strict=True))
    T = np.unique(np.geomspace(1, steps, 40).round().astype(np.int64))
    means, loss = np.cumsum(squared, axis=1)[:, T - 1] / T, losses.mean(axis=0)
    measured = means.mean(axis=0)
    extra = L**3 * eta_0**2 * rho_0**2 * math.pi**2 / 6 if method == "SSAM" else 0.0
    constant, log_constant = 2 / eta_0 * (loss[0] - loss[T] + extra), 2 * L * (sigma**2 * eta_0 + G * rho_0)
    harmonic = np.cumsum(1 / np.arange(1, steps + 1))[T - 1]
    bound, bound_harmonic = ((constant + log_constant * total) / np.sqrt(T) for total in (np.log(T), harmonic))
    half, sampling_error = len(T) // 2, 5 * math.sqrt(2 / (steps * runs))
    return Convergence(
        method=method,
        T=T,
        measured=measured,
        deviation=means.std(axis=0, ddof=1) if runs > 1 else np.full(len(T), np.nan),
        bound=bound,
        bound_harmonic=bound_harmonic,
        constant=float(constant[-1]),
        log_constant=log_constant,
        assumptions={
            "||∇f(w)|| <= G": [math.sqrt(squared.max()), G],
            "||Hessian|| <= L": [float(curvatures.max()), L],
            "E||g - ∇f||² <= sigma² + 5 standard errors": [float(noises.mean()), sigma**2 * (1 + sampling_error)],
            f"rho_0 <= G eta_0 / {divisor}": [rho_0, G * eta_0 / divisor],
            "eta_0 <= 1 / L": [eta_0, 1 / L],
        },
        slope=float(np.polyfit(np.log(T[half:]), np.log(measured[half:]), 1)[0]) if len(T) > 2 else math.nan,
        notes=["the expectation is a mean over few runs; runs can confirm the bound's shape, not its size"],
    )


def _run(
    problem: SmoothProblem, steps: int, eta_0: float, rho_0: float, sigma: float, sparsity: float, seed: int
) -> tuple[list[float], list[float], float, float]:
    """Returns ||∇f(w_t)||² for t = 1..T, f(w_t) for t = 1..T+1, the largest curvature and the mean noise."""
    w = nn.Parameter(problem.start.clone())
    generator = torch.Generator().manual_seed(seed)
    base = torch.optim.SGD([w], lr=eta_0)
    mask = random_mask(sparsity=sparsity, seed=seed)
    optimizer = SSAM(base, nn.ParameterList([w]), rho_0, mask=mask, rho_schedule=InverseSqrt())
    schedule = torch.optim.lr_scheduler.LambdaLR(base, lambda step: 1 / math.sqrt(step + 1))
    squared, losses, noises, curvatures = [], [], [], []

    def closure() -> Tensor:
        loss = problem.f(w)
        if not bool(loss.isfinite()):
            raise ValueError(f"the run diverged: the loss is {float(loss.detach())}; lower eta_0 or rho_0")
        (gradient,) = torch.autograd.grad(loss, [w])
        passes.append(float(gradient.square().sum()))
        w.grad = gradient + xi
        return loss.detach()

    looks = set(np.geomspace(1, steps, 12).round())
    for step in range(1, steps + 1):
        if step in looks:  # the full Hessian: these problems are small
            curvatures.append(float(torch.linalg.matrix_norm(hessian(problem.f)(w.detach()), 2)))
        xi = torch.randn(w.shape, generator=generator, dtype=w.dtype) * (sigma / math.sqrt(w.numel()))
        passes: list[float] = []  # squared gradient norms at w_t and at w_t + e
        losses.append(float(optimizer.step(closure)))
        squared.append(passes[0])
        noises.append(float(xi.square().sum()))
        schedule.step()
    return squared, [*losses, float(problem.f(w.detach()))], max(curvatures), float(np.mean(noises))
