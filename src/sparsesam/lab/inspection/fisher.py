"""The agreement of the Fisher information with the Hessian's diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sparsesam.analysis import FisherAgreement, ProgressCallback, fisher_vs_hessian
from sparsesam.lab.display import Axis, Cell, Figure, Series, number_cell, percent
from sparsesam.lab.experiment.setting_types import option
from sparsesam.lab.inspection.analysis import LabeledResult, LayerAnalysis, Summary
from sparsesam.lab.inspection.trained_run import TrainedRun


@dataclass(frozen=True)
class FisherAnalysis(LayerAnalysis[FisherAgreement]):
    help = "agreement of the Fisher information with the Hessian's diagonal"
    title = "Fisher information and Hessian"
    caption = "Correlation of the Fisher information with the Hessian’s diagonal h, and with its magnitude |h|."
    files = ("fisher", "fisher-layers")
    result_type = FisherAgreement

    probes: int | None = option(None, "random vectors for the diagonal; default exact up to 5000 weights, else 100")
    labels: Literal["data", "sampled"] = option("data", "labels of the Fisher information")

    def measure(self, run: TrainedRun, progress: ProgressCallback) -> FisherAgreement:
        return fisher_vs_hessian(
            run.objective,
            probes=self.probes,
            labels=self.labels,
            parameters=self.layers,
            seed=run.on.seed,
            progress=progress,
        )

    @classmethod
    def summary(cls, result: FisherAgreement) -> Summary:
        return {
            "Pearson, |h|": result.pearson_magnitude,
            "Spearman, |h|": result.spearman_magnitude,
            "Pearson, h": result.pearson,
            "h < 0": number_cell(result.negative_share, percent),
            **{f"kept in common at {s}": number_cell(kept, percent) for s, kept in result.kept_in_common.items()},
            "weights": result.weights,
            "Hessian’s diagonal": Cell(result.hessian),
        }

    @classmethod
    def figures(cls, name: str, results: Sequence[LabeledResult[FisherAgreement]]) -> list[Figure]:
        title = cls.title_of("Fisher information and |h|", name)
        caption = "Up to 2000 weights. Pairs with a zero are left out."
        x, y = Axis("Fisher information", log=True), Axis("|h|", log=True)
        points = {run.label: [_scatter(run)] for run in results}
        scatter = Figure(f"{name}-scatter", title, caption, x, y, points, kind="points")
        title = cls.title_of("Weights kept in common", name)
        caption = "Of the weights that Fisher information keeps, the share that |h| would keep too."
        sparsities = [float(sparsity) for sparsity in results[0].result.kept_in_common]
        shares = [(run, run.result.kept_in_common.values()) for run in results]
        lines = [run.series(sparsities, [100 * share for share in kept]) for run, kept in shares]
        chance = Series("by chance", "ink", sparsities, [100 * (1 - sparsity) for sparsity in sparsities], faint=True)
        panels = {"": [*lines, chance]}
        return [scatter, Figure(f"{name}-kept", title, caption, Axis("sparsity"), Axis("kept by both (%)"), panels)]


def _scatter(run: LabeledResult[FisherAgreement]) -> Series:
    fisher, h = run.result.scatter.T
    shown = (fisher > 0) & (h != 0)
    return run.series(fisher[shown], np.abs(h[shown]))
