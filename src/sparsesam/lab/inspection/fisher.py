"""The agreement of the Fisher information with the Hessian's diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sparsesam.analysis import FisherAgreement, ProgressCallback, fisher_vs_hessian
from sparsesam.lab.display import Axis, Figure, Series, number_cell, percent
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
            "Hessian’s diagonal": result.hessian,
        }

    @classmethod
    def figures(cls, name: str, results: Sequence[LabeledResult[FisherAgreement]]) -> list[Figure]:
        points, lines = {}, []
        for run in results:
            fisher, h = run.result.scatter.T
            shown = (fisher > 0) & (h != 0)
            points[run.label] = [run.series(fisher[shown], np.abs(h[shown]))]
            kept = {float(sparsity): 100 * share for sparsity, share in run.result.kept_in_common.items()}
            lines.append(run.series(kept, kept.values()))
        lines.append(Series("by chance", "ink", list(kept), [100 * (1 - sparsity) for sparsity in kept], faint=True))
        title, caption = cls.title_of("Fisher information and |h|", name), "Up to 2000 weights, without pairs with a 0."
        x, y = Axis("Fisher information", log=True), Axis("|h|", log=True)
        scatter = Figure(f"{name}-scatter", title, caption, x, y, points, kind="points")
        title, x, y = cls.title_of("Weights kept in common", name), Axis("sparsity"), Axis("kept by both (%)")
        caption = "Of the weights that Fisher information keeps, the share that |h| would keep too."
        return [scatter, Figure(f"{name}-kept", title, caption, x, y, {"": lines})]
