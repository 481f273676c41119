"""The Hessian's eigenvalues, trace and spectral density, and the agreement of Fisher information with its diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sparsesam.analysis import (
    AnalysisResult,
    FisherAgreement,
    HessianSpectrum,
    HessianTrace,
    SpectralDensity,
    fisher_vs_hessian,
    hessian_eigenvalues,
    hessian_trace,
    spectral_density,
)
from sparsesam.lab.display import Axis, Cell, Figure, Series, error_bars, number_cell, percent, plus_minus
from sparsesam.lab.experiment.setting_types import option
from sparsesam.lab.inspection.analysis import Analysis, Measured, Progress, ResultT, Summary
from sparsesam.lab.inspection.trained_run import TrainedRun

#: Below this share of its peak, the density shows only the tails of the smoothing Gaussians.
_FLOOR = 1e-6


@dataclass(frozen=True)
class LayerAnalysis(Analysis[ResultT]):
    """An analysis of all parameters or, with ``layers``, of some; the latter's result is ``NAME-layers.json``."""

    layers: str | None = option(None, "only parameters whose names match a pattern, such as 'layer4.*,fc.*'")

    @property
    def name(self) -> str:
        return self.files[0] if self.layers is None else self.files[1]


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

    count: int = option(5, "number of eigenvalues; the ratio lambda_1 / lambda_5 needs five")
    tolerance: float = option(1e-3, "relative error of the eigenvalues")
    trace_probes: int = option(100, "most random vectors for the trace; stops early at a standard error of 1 %")
    density_probes: int = option(4, "random vectors for the density")
    density_steps: int = option(80, "Lanczos steps per random vector of the density")
    keep_graph: bool = option(False, "keep the graphs of the batches: half the time, several times the memory")

    def measure(self, subject: TrainedRun, progress: Progress) -> HessianResult:
        common: dict[str, Any] = {"parameters": self.layers, "keep_graph": self.keep_graph, "seed": subject.on.seed}
        objective = subject.objective
        eigenvalues = hessian_eigenvalues(objective, self.count, tolerance=self.tolerance, **common)
        progress(1, 3)
        trace = hessian_trace(objective, probes=self.trace_probes, tolerance=0.01, **common)
        progress(2, 3)
        density = spectral_density(objective, steps=self.density_steps, probes=self.density_probes, **common)
        progress(3, 3)
        return HessianResult(eigenvalues, trace, density)

    @classmethod
    def summary(cls, result: HessianResult) -> Summary:
        spectrum, trace, density = result.eigenvalues, result.trace, result.density
        return {
            "lambda_1": spectrum.eigenvalues[0],
            "lambda_1 / lambda_5": spectrum.ratio,
            "trace": number_cell(trace.trace, lambda value: plus_minus(value, trace.standard_error)),
            "smallest Ritz value": min(float(nodes.min()) for nodes in density.nodes),
            "weights": spectrum.size,
            "products": spectrum.products + trace.products + density.products,
            "converged": Cell("yes" if spectrum.converged else "no"),
        }

    @classmethod
    def figures(cls, name: str, measured: Sequence[Measured[HessianResult]]) -> list[Figure]:
        where = _some_layers(name)
        eigenvalue, share = Axis("eigenvalue"), Axis("share of eigenvalues per unit", log=True)
        title, caption = f"Largest eigenvalues{where}", "Bars are estimated errors."
        panels = {"": [_eigenvalues(one) for one in measured]}
        rank = Axis("rank", whole=True)
        largest = Figure(f"{name}-eigenvalues", title, caption, rank, eigenvalue, panels, kind="points")
        caption = "Stochastic Lanczos quadrature; the further right the density extends, the sharper the minimum."
        panels = {"": [_density(one) for one in measured]}
        return [largest, Figure(f"{name}-density", f"Spectral density{where}", caption, eigenvalue, share, panels)]


def _some_layers(name: str) -> str:
    return ", some layers" if name.endswith("-layers") else ""


def _eigenvalues(one: Measured[HessianResult]) -> Series:
    spectrum = one.result.eigenvalues
    values, errors = spectrum.eigenvalues.tolist(), spectrum.error_bounds.tolist()
    return one.series(range(1, len(values) + 1), values, bars=error_bars(values, errors))


def _density(one: Measured[HessianResult]) -> Series:
    density = one.result.density
    return one.series(density.grid, np.where(density.density > _FLOOR * density.density.max(), density.density, np.nan))


@dataclass(frozen=True)
class FisherAnalysis(LayerAnalysis[FisherAgreement]):
    help = "agreement of the Fisher information with the Hessian's diagonal"
    title = "Fisher information and Hessian"
    caption = "Correlation of the Fisher information with the Hessian’s diagonal h, and with its magnitude |h|."
    files = ("fisher", "fisher-layers")

    probes: int | None = option(None, "random vectors for the diagonal; default exact up to 5000 weights, else 100")
    labels: Literal["data", "sampled"] = option("data", "labels of the Fisher information")

    def measure(self, subject: TrainedRun, progress: Progress) -> FisherAgreement:
        return fisher_vs_hessian(
            subject.objective, probes=self.probes, labels=self.labels, parameters=self.layers, seed=subject.on.seed
        )

    @classmethod
    def summary(cls, result: FisherAgreement) -> Summary:
        return {
            "Pearson, |h|": result.pearson_magnitude,
            "Spearman, |h|": result.spearman_magnitude,
            "Pearson, h": result.pearson,
            "h < 0": number_cell(result.negative_share, percent),
            **{f"kept in common at {s}": number_cell(one, percent) for s, one in result.kept_in_common.items()},
            "weights": result.weights,
            "Hessian’s diagonal": Cell(result.hessian),
        }

    @classmethod
    def figures(cls, name: str, measured: Sequence[Measured[FisherAgreement]]) -> list[Figure]:
        where = _some_layers(name)
        title, caption = f"Fisher information and |h|{where}", "Up to 2000 weights. Pairs with a zero are left out."
        x, y = Axis("Fisher information", log=True), Axis("|h|", log=True)
        points = {one.label: [_scatter(one)] for one in measured}
        scatter = Figure(f"{name}-scatter", title, caption, x, y, points, kind="points")
        sparsities = [float(sparsity) for sparsity in measured[0].result.kept_in_common]
        chance = Series("by chance", "ink", sparsities, [100 * (1 - one) for one in sparsities], faint=True)
        title = f"Weights kept in common{where}"
        caption = "Of the weights that Fisher information keeps, the share that |h| would keep too."
        lines = {"": [*(_kept(one) for one in measured), chance]}
        kept = Figure(f"{name}-kept", title, caption, Axis("sparsity"), Axis("kept by both (%)"), lines)
        return [scatter, kept]


def _scatter(one: Measured[FisherAgreement]) -> Series:
    fisher, h = one.result.scatter.T
    shown = (fisher > 0) & (h != 0)
    return one.series(fisher[shown], np.abs(h[shown]))


def _kept(one: Measured[FisherAgreement]) -> Series:
    kept = one.result.kept_in_common
    return one.series([float(sparsity) for sparsity in kept], [100 * share for share in kept.values()])
