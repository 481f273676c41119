"""The Hessian's largest eigenvalues, trace and spectral density."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsesam.analysis import (
    AnalysisResult,
    HessianSpectrum,
    HessianTrace,
    SpectralDensity,
    hessian_eigenvalues,
    hessian_trace,
    spectral_density,
)
from sparsesam.lab.display import Axis, Cell, Figure, Series, error_bars, number, number_cell, numbers, plus_minus
from sparsesam.lab.experiment.setting_types import option
from sparsesam.lab.inspection.analysis import LayerAnalysis, Measured, Progress
from sparsesam.lab.inspection.trained_run import TrainedRun

#: Below this share of its peak, the density shows only the Gaussians that smooth it.
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
    caption = "Curvature: a smaller lambda_1 and a smaller trace mean a flatter minimum. ± is the standard error."
    files = ("hessian", "hessian-layers")
    result_type = HessianResult

    count: int = option(5, "number of eigenvalues; the ratio lambda_1 / lambda_5 needs five")
    tolerance: float = option(1e-3, "relative error of the eigenvalues")
    trace_probes: int = option(100, "random vectors for the trace; it stops earlier once the error is below 1 %")
    density_probes: int = option(4, "random vectors for the density")
    density_steps: int = option(80, "Lanczos steps from each of them")
    keep_graph: bool = option(False, "half the time for several times the memory")

    def measure(self, subject: TrainedRun, progress: Progress) -> HessianResult:
        common: dict[str, Any] = {"parameters": self.patterns, "keep_graph": self.keep_graph, "seed": subject.on.seed}
        objective = subject.objective
        eigenvalues = hessian_eigenvalues(objective, self.count, tolerance=self.tolerance, **common)
        progress(1, 3)
        trace = hessian_trace(objective, probes=self.trace_probes, tolerance=0.01, **common)
        progress(2, 3)
        density = spectral_density(objective, steps=self.density_steps, probes=self.density_probes, **common)
        progress(3, 3)
        return HessianResult(eigenvalues, trace, density)

    @classmethod
    def summary(cls, result: HessianResult) -> dict[str, Cell]:
        spectrum, trace, density = result.eigenvalues, result.trace, result.density
        smallest = min(float(nodes.min()) for nodes in density.nodes)
        return {
            "lambda_1": number_cell(spectrum.eigenvalues[0]),
            "lambda_1 / lambda_5": number_cell(spectrum.ratio),
            "trace": Cell(plus_minus(trace.trace, trace.standard_error), order=number(trace.trace)),
            "smallest Ritz value": number_cell(smallest),
            "weights": number_cell(spectrum.size),
            "products": number_cell(spectrum.products + trace.products + density.products),
            "converged": Cell("yes" if spectrum.converged else "no"),
        }

    @classmethod
    def figures(cls, name: str, measured: Sequence[Measured[HessianResult]]) -> list[Figure]:
        where = ", some layers" if name.endswith("-layers") else ""
        eigenvalues = Figure(
            name=f"{name}-eigenvalues",
            title=f"Largest eigenvalues{where}",
            caption="Bars are estimates of their error.",
            kind="points",
            x=Axis("rank", whole=True),
            y=Axis("eigenvalue"),
            panels={"": [_eigenvalues(one) for one in measured]},
        )
        density = Figure(
            name=f"{name}-density",
            title=f"Spectral density{where}",
            caption="By stochastic Lanczos quadrature; the further right it reaches, the sharper the minimum.",
            x=Axis("eigenvalue"),
            y=Axis("share of eigenvalues per unit", log=True),
            panels={"": [_density(one) for one in measured]},
        )
        return [eigenvalues, density]


def _eigenvalues(one: Measured[HessianResult]) -> Series:
    spectrum = one.result.eigenvalues
    values, errors = numbers(spectrum.eigenvalues.tolist()), numbers(spectrum.error_bounds.tolist())
    return one.series(range(1, len(values) + 1), values, bars=error_bars(values, errors))


def _density(one: Measured[HessianResult]) -> Series:
    density = one.result.density
    return one.series(density.grid, np.where(density.density > _FLOOR * density.density.max(), density.density, np.nan))
