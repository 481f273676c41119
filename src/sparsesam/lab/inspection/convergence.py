"""Theorems 1 and 2 compared with measured runs of a smooth problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparsesam.analysis import AnalysisResult, Convergence, ProgressCallback, measure_convergence, nonconvex_logistic
from sparsesam.lab.display import Axis, Cell, Figure, Series, SeriesStyle, error_bars, numbers
from sparsesam.lab.experiment.setting_types import option
from sparsesam.lab.inspection.analysis import Analysis, LabeledResult, Summary
from sparsesam.lab.inspection.trained_run import Origin, ResultDirectory


@dataclass(frozen=True)
class ConvergenceResult(AnalysisResult):
    sam: Convergence
    ssam: Convergence

    @property
    def methods(self) -> list[Convergence]:
        return [self.sam, self.ssam]


@dataclass(frozen=True)
class ConvergenceAnalysis(Analysis[ConvergenceResult]):
    help = "theorems 1 and 2 compared with measured runs of a smooth problem; needs no trained run"
    title = "Convergence"
    caption = "1/T Σ ||∇f(w_t)||² at the last T, the theorem’s bound, and whether its assumptions hold."
    files = ("convergence",)
    result_type = ConvergenceResult
    subject_type = ResultDirectory

    steps: int = option(1000, "steps of each run")
    runs: int = option(4, "number of runs to average over")
    sigma: float = option(0.5, "standard deviation of the gradient noise")
    sparsity: float = option(0.5, "share of weights that SSAM does not perturb")
    eta_0: float | None = option(None, "initial learning rate; default 1 / L")
    rho_0: float | None = option(None, "initial rho; default the largest that the theorem allows")
    seed: int = option(0, "seed of the problem, the noise and the mask")

    def measure(self, subject: ResultDirectory, progress: ProgressCallback) -> ConvergenceResult:
        problem = nonconvex_logistic(seed=self.seed)
        sam = measure_convergence("SAM", problem=problem, **self.options)
        progress(1, 2)
        ssam = measure_convergence("SSAM", problem=problem, **self.options)
        progress(2, 2)
        return ConvergenceResult(sam, ssam)

    def origin(self, subject: ResultDirectory) -> Origin:
        return Origin(seed=self.seed)

    @classmethod
    def summary(cls, result: ConvergenceResult) -> Summary:
        return {f"{one.method}: {name}": cell for one in result.methods for name, cell in _row(one).items()}

    @classmethod
    def figures(cls, name: str, results: Sequence[LabeledResult[ConvergenceResult]]) -> list[Figure]:
        caption = (
            "1/T Σ ||∇f(w_t)||², mean and standard deviation over the runs, and the theorem’s bound: as printed, with "
            "log T, and with Σ 1/t in its place, which the proof needs."
        )
        x, y = Axis("T", log=True), Axis("mean squared gradient norm", log=True)
        panels = {
            one.method if len(results) == 1 else f"{one.method}, {found.label}": _curves(one)
            for found in results
            for one in found.result.methods
        }
        return [Figure("convergence", "Measured and bound", caption, x, y, panels)]


def _row(one: Convergence) -> Summary:
    failed = "; ".join(each.text for each in one.assumptions if not each.holds)
    return {
        "T": int(one.T[-1]),
        "mean ||∇f||²": one.measured[-1],
        "bound as printed": one.bound[-1],
        "bound with Σ 1/t": one.bound_harmonic[-1],
        "slope in log T": one.slope,
        "assumptions": Cell(
            f"not satisfied: {failed}" if failed else "all satisfied", status="failed" if failed else "finished"
        ),
    }


def _curves(one: Convergence) -> list[Series]:
    bars = error_bars(numbers(one.measured), numbers(one.deviation))
    # The printed bound can be 0 or less at T = 1, which a logarithmic axis cannot show.
    printed, harmonic = (np.where(curve > 0, curve, np.nan) for curve in (one.bound, one.bound_harmonic))
    return [
        SeriesStyle("blue").series(f"measured, {one.method}", one.T, one.measured, bars=bars),
        SeriesStyle("orange").series("bound, log T", one.T, printed),
        SeriesStyle("green").series("bound, Σ 1/t", one.T, harmonic),
    ]
