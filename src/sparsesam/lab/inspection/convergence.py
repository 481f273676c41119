"""Theorems 1 and 2 compared with measured runs of a smooth problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparsesam.analysis import AnalysisResult, Convergence, ProgressCallback, measure_convergence, nonconvex_logistic
from sparsesam.lab.display import Axis, Cell, Figure, Series, SeriesStyle, error_bars, numbers
from sparsesam.lab.experiment.setting_types import option
from sparsesam.lab.inspection.analysis import Analysis, LabeledResult, Summary
from sparsesam.lab.inspection.trained_run import TrainedRun


@dataclass(frozen=True)
class ConvergenceResult(AnalysisResult):
    sam: Convergence
    ssam: Convergence


@dataclass(frozen=True)
class ConvergenceAnalysis(Analysis[ConvergenceResult]):
    help = "theorems 1 and 2 compared with measured runs of a smooth problem; needs no trained run"
    title = "Convergence"
    caption = "1/T Σ ||∇f(w_t)||² at the last T, the theorem’s bound, and whether its assumptions hold."
    files = ("convergence",)
    result_type = ConvergenceResult
    needs = "nothing"

    steps: int = option(1000, "steps of each run")
    runs: int = option(4, "number of runs to average over")
    sigma: float = option(0.5, "standard deviation of the gradient noise")
    sparsity: float = option(0.5, "share of weights that SSAM does not perturb")
    eta_0: float | None = option(None, "initial learning rate; default 1 / L")
    rho_0: float | None = option(None, "initial rho; default the largest that the theorem allows")
    seed: int = option(0, "seed of the problem, the noise and the mask")

    def measure(self, run: TrainedRun, progress: ProgressCallback) -> ConvergenceResult:
        problem = nonconvex_logistic(seed=self.seed)
        progress(0, 2)
        sam = measure_convergence("SAM", problem=problem, **self.options)
        progress(1, 2)
        ssam = measure_convergence("SSAM", problem=problem, **self.options)
        progress(2, 2)
        return ConvergenceResult(sam, ssam)

    @classmethod
    def summary(cls, result: ConvergenceResult) -> Summary:
        row: Summary = {}
        for found in (result.sam, result.ssam):
            violated, method = found.violated, found.method
            assumptions = f"not satisfied: {'; '.join(violated)}" if violated else "all satisfied"
            row |= {
                f"{method}: T": int(found.T[-1]),
                f"{method}: mean ||∇f||²": found.measured[-1],
                f"{method}: bound as printed": found.bound[-1],
                f"{method}: bound with Σ 1/t": found.bound_harmonic[-1],
                f"{method}: slope in log T": found.slope,
                f"{method}: assumptions": Cell(assumptions, status="failed" if violated else "finished"),
            }
        return row

    @classmethod
    def figures(cls, name: str, results: Sequence[LabeledResult[ConvergenceResult]]) -> list[Figure]:
        caption = (
            "1/T Σ ||∇f(w_t)||², mean and standard deviation over the runs, and the theorem’s bound: as printed, with "
            "log T, and with Σ 1/t in its place, which the proof needs."
        )
        x, y = Axis("T", log=True), Axis("mean squared gradient norm", log=True)
        panels = {
            found.method if len(results) == 1 else f"{found.method}, {directory.label}": _curves(found)
            for directory in results
            for found in (directory.result.sam, directory.result.ssam)
        }
        return [Figure("convergence", "Measured and bound", caption, x, y, panels)]


def _curves(found: Convergence) -> list[Series]:
    bars = error_bars(numbers(found.measured), numbers(found.deviation))
    # The printed bound can be 0 or less at T = 1, which a logarithmic axis cannot show.
    printed, harmonic = (np.where(curve > 0, curve, np.nan) for curve in (found.bound, found.bound_harmonic))
    return [
        SeriesStyle("blue").series(f"measured, {found.method}", found.T, found.measured, bars=bars),
        SeriesStyle("orange").series("bound, log T", found.T, printed),
        SeriesStyle("green").series("bound, Σ 1/t", found.T, harmonic),
    ]
