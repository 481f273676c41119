"""The Hessian's eigenvalues, trace and spectral density."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparsesam.analysis import (
    AnalysisResult,
    HessianOperator,
    HessianSpectrum,
    HessianTrace,
    ProgressCallback,
    SpectralDensity,
    hessian_eigenvalues,
    hessian_trace,
    spectral_density,
)
from sparsesam.lab.display import Axis, Figure
from sparsesam.lab.experiment.setting_types import option
from sparsesam.lab.inspection.analysis import LabeledResult, LayerAnalysis, Summary
from sparsesam.lab.inspection.trained_run import TrainedRun

#: Below this share of its peak, the density shows only the tails of the smoothing Gaussians.
_FLOOR = 1e-6


@dataclass(frozen=True)
class HessianResult(AnalysisResult):
    eigenvalues: HessianSpectrum
    trace: HessianTrace
    density: SpectralDensity


@dataclass(frozen=True)
class HessianAnalysis(LayerAnalysis[HessianResult]):
    help = "the Hessian's largest eigenvalues, trace and spectral density"
    title = "Hessian"
    caption = "Curvature: flatter minima have a smaller lambda_1 and trace."
    files = ("hessian", "hessian-layers")
    result_type = HessianResult

    count: int = option(5, "number of eigenvalues; the ratio lambda_1 / lambda_5 needs five")
    tolerance: float = option(1e-3, "relative error of the eigenvalues")
    trace_probes: int = option(100, "most random vectors for the trace; stops early at a standard error of 1 %")
    density_probes: int = option(4, "random vectors for the density")
    density_steps: int = option(80, "Lanczos steps per random vector of the density")
    keep_graph: bool = option(False, "keep the graphs of the batches: half the time, several times the memory")

    def measure(self, run: TrainedRun, progress: ProgressCallback) -> HessianResult:
        # Eigenvalues may take fewer or more products, the trace and the density fewer.
        total = 3 * self.count + self.trace_probes + self.density_probes * self.density_steps
        done = itertools.count(1)
        hessian = HessianOperator(
            run.objective,
            parameters=self.layers,
            keep_graph=self.keep_graph,
            on_product=lambda: progress(min(next(done), total), total),
        )
        seed = run.on.seed
        eigenvalues = hessian_eigenvalues(hessian, self.count, tolerance=self.tolerance, seed=seed)
        trace = hessian_trace(hessian, probes=self.trace_probes, tolerance=0.01, seed=seed)
        density = spectral_density(hessian, steps=self.density_steps, probes=self.density_probes, seed=seed)
        return HessianResult(eigenvalues, trace, density)

    @classmethod
    def summary(cls, result: HessianResult) -> Summary:
        spectrum, trace, density = result.eigenvalues, result.trace, result.density
        return {
            "lambda_1": spectrum.eigenvalues[0],
            "lambda_1 / lambda_5": spectrum.ratio,
            "trace": trace.trace,
            "standard error": trace.standard_error,
            "smallest Ritz value": min(float(nodes.min()) for nodes in density.nodes),
            "weights": spectrum.size,
            "products": spectrum.products + trace.products + density.products,
            "converged": "yes" if spectrum.converged else "no",
        }

    @classmethod
    def figures(cls, name: str, results: Sequence[LabeledResult[HessianResult]]) -> list[Figure]:
        series = []
        for run in results:
            density = run.result.density.density
            shown = np.where(density > _FLOOR * density.max(), density, np.nan)
            series.append(run.series(run.result.density.grid, shown))
        title, caption = cls.title_of("Spectral density", name), "Further right, the minimum is sharper."
        x, y = Axis("eigenvalue"), Axis("share of eigenvalues per unit", log=True)
        return [Figure(f"{name}-density", title, caption, x, y, {"": series})]
