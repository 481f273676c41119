"""Theorems 1 and 2 compared with measured runs of a smooth problem.

    1/T sum_t E||∇f(w_t)||² <= C_1 / sqrt(T) + C_2 log T / sqrt(T)        eta_t = eta_0 / sqrt(t)
                                                                         rho_t = rho_0 / sqrt(t)
    SAM    C_1 = 2 / eta_0 (f(w_0) - E f(w_T))                             C_2 = 2 (L sigma² eta_0 + L G rho_0)
    SSAM   C_3 = 2 / eta_0 (f(w_0) - E f(w_T) + L³ eta_0² rho_0² π² / 6)    C_4 = C_2

The proofs bound sum_{t<=T} 1/t by log T, which is too small: the sum is at most 1 + log T, and at T = 1 it is 1 while
log T is 0. With the harmonic number itself in place of log T the proofs hold, so both curves are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from sparsesam import SSAM, InverseSqrt, random_mask
from sparsesam.analysis import AnalysisResult, ProgressCallback
from sparsesam.analysis.results import Array
from sparsesam.lab.display import Axis, Figure, SeriesStyle
from sparsesam.lab.experiment.setting_types import PositiveInt, option
from sparsesam.lab.inspection.analysis import Analysis, LabeledResult, Summary
from sparsesam.lab.inspection.trained_run import TrainedRun


def nonconvex_logistic(seed: int = 0) -> tuple[Callable[[Tensor], Tensor], Tensor, float, float]:
    """f(w) = mean log(1 + exp(-y x·w)) + 0.1 sum w² / (1 + w²): smooth, not convex, gradient bounded.

    Returns f, a start, L = ||X||² / (4 samples) + 0.2 and G = mean ||x|| + 0.1 sqrt(size) * 3 sqrt(3) / 8, with
    ||Hessian|| <= L and ||∇f|| <= G everywhere.
    """
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = draw(200, 20)
    y, start = torch.sign(x @ draw(20) + draw(200)), 2 * draw(20)

    def f(w: Tensor) -> Tensor:
        return nn.functional.softplus(-y * (x @ w)).mean() + 0.1 * (w.square() / (1 + w.square())).sum()

    L = float(torch.linalg.matrix_norm(x, 2)) ** 2 / (4 * len(x)) + 0.2
    return f, start, L, float(x.norm(dim=1).mean()) + 0.1 * math.sqrt(len(start)) * 3 * math.sqrt(3) / 8


@dataclass(frozen=True)
class Convergence(AnalysisResult):
    """``measured`` and ``deviation``: mean and standard deviation over the runs of 1/T sum_{t<=T} ||∇f(w_t)||², at
    ``T``. ``bound`` is the theorem's right-hand side as printed, ``bound_harmonic`` has sum 1/t in place of log T.

    ``constant`` and ``log_constant`` are the factors of 1 / sqrt(T) and log T / sqrt(T) at the last T: C_1 and C_2 for
    SAM, C_3 and C_4 for SSAM. ``slope``: of log measured against log T over the second half of the points.
    """

    T: Array
    measured: Array
    deviation: Array
    bound: Array
    bound_harmonic: Array
    constant: float
    log_constant: float
    slope: float


@dataclass(frozen=True)
class ConvergenceResult(AnalysisResult):
    methods: dict[str, Convergence]


@dataclass(frozen=True)
class ConvergenceAnalysis(Analysis[ConvergenceResult]):
    help = "theorems 1 and 2 compared with measured runs of a smooth problem; needs no trained run"
    title = "Convergence"
    caption = "1/T Σ ||∇f(w_t)||² at the last T, and the theorem’s bound."
    files = ("convergence",)
    result_type = ConvergenceResult
    needs = "nothing"

    steps: PositiveInt = option(1000, "steps of each run")
    runs: PositiveInt = option(4, "number of runs to average over")
    sigma: float = option(0.5, "standard deviation of the gradient noise")
    sparsity: float = option(0.5, "share of weights that SSAM does not perturb")
    seed: int = option(0, "seed of the problem, the noise and the mask")

    def measure(self, run: TrainedRun, progress: ProgressCallback) -> ConvergenceResult:
        return ConvergenceResult({"SAM": self.compare("SAM"), "SSAM": self.compare("SSAM")})

    def compare(self, method: str) -> Convergence:
        """Run the method on `nonconvex_logistic` and evaluate its theorem.

        eta_0 = 1 / L and rho_0 = G eta_0 / 2 (SAM) or / 5 (SSAM) are the largest values that the theorems allow; the
        first condition is from the lemmas, the main text omits it. The stochastic gradient is that of f(w) + <xi, w>,
        with xi drawn in each step, Gaussian with E||xi||² = sigma². SSAM perturbs a fixed random set of weights.
        """
        f, start, L, G = nonconvex_logistic(seed=self.seed)
        eta_0, rho_0, sparsity = (1 / L, G / L / 2, 0.0) if method == "SAM" else (1 / L, G / L / 5, self.sparsity)
        squared, losses = np.zeros((self.runs, self.steps)), np.zeros((self.runs, self.steps + 1))
        for run in range(self.runs):
            w, xi, seed = nn.Parameter(start.clone()), torch.zeros_like(start), self.seed + run
            base, generator = torch.optim.SGD([w], lr=eta_0), torch.Generator().manual_seed(seed)
            mask = random_mask(sparsity=sparsity, seed=seed)
            optimizer = SSAM(base, nn.ParameterList([w]), rho_0, mask=mask, rho_schedule=InverseSqrt())
            schedule = torch.optim.lr_scheduler.LambdaLR(base, lambda step: 1 / math.sqrt(step + 1))
            for step in range(self.steps):
                losses[run, step] = f(w).item()
                squared[run, step] = torch.func.grad(f)(w.detach()).square().sum().item()
                xi.normal_(0, self.sigma / math.sqrt(w.numel()), generator=generator)
                optimizer.minimize(lambda w=w, xi=xi: f(w) + xi @ w)
                schedule.step()
            losses[run, -1] = f(w).item()
        T = np.unique(np.geomspace(1, self.steps, 40).round().astype(np.int64))
        means, loss = np.cumsum(squared, axis=1)[:, T - 1] / T, losses.mean(axis=0)
        extra = 0.0 if method == "SAM" else L**3 * eta_0**2 * rho_0**2 * math.pi**2 / 6
        constant, log_constant = 2 / eta_0 * (loss[0] - loss[T] + extra), 2 * L * (self.sigma**2 * eta_0 + G * rho_0)
        sums = np.log(T), np.cumsum(1 / np.arange(1, self.steps + 1))[T - 1]
        bound, harmonic = ((constant + log_constant * total) / np.sqrt(T) for total in sums)
        measured, late = means.mean(axis=0), len(T) // 2
        deviation = means.std(axis=0, ddof=1) if self.runs > 1 else np.full(len(T), np.nan)
        slope = float(np.polyfit(np.log(T[late:]), np.log(measured[late:]), 1)[0]) if len(T) > 2 else math.nan
        constants = float(constant[-1]), log_constant
        return Convergence(T.astype(np.float64), measured, deviation, bound, harmonic, *constants, slope)

    @classmethod
    def summary(cls, result: ConvergenceResult) -> Summary:
        row: Summary = {}
        for method, found in result.methods.items():
            row[f"{method}: mean ||∇f||²"] = found.measured[-1]
            row[f"{method}: bound as printed"] = found.bound[-1]
            row[f"{method}: bound with Σ 1/t"] = found.bound_harmonic[-1]
            row[f"{method}: slope in log T"] = found.slope
        return row

    @classmethod
    def figures(cls, name: str, results: Sequence[LabeledResult[ConvergenceResult]]) -> list[Figure]:
        caption = "Mean and standard deviation over runs; the bound has log T as printed, Σ 1/t as the proof needs."
        panels = {}
        for directory in results:
            for method, found in directory.result.methods.items():
                ends = (found.measured - found.deviation).tolist(), (found.measured + found.deviation).tolist()
                bars = None if np.isnan(found.deviation).any() else list(zip(*ends, strict=True))
                printed = np.where(found.bound > 0, found.bound, np.nan)  # it can be 0 or less at T = 1
                panels[", ".join(filter(None, (method, directory.label)))] = [
                    SeriesStyle("blue").series(f"measured, {method}", found.T, found.measured, bars=bars),
                    SeriesStyle("orange").series("bound, log T", found.T, printed),
                    SeriesStyle("green").series("bound, Σ 1/t", found.T, found.bound_harmonic),
                ]
        x, y = Axis("T", log=True), Axis("mean squared gradient norm", log=True)
        return [Figure("convergence", "Measured and bound", caption, x, y, panels)]
