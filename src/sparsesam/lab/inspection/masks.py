"""How the recorded masks of a run change during training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparsesam.analysis import MaskHistory, ProgressCallback, masks_over_time
from sparsesam.lab.display import Axis, Figure, number_cell, percent
from sparsesam.lab.experiment.run_directory import read_masks
from sparsesam.lab.inspection.analysis import Analysis, LabeledResult, Prepared, Summary
from sparsesam.lab.inspection.trained_run import TrainedRun


@dataclass(frozen=True)
class MaskAnalysis(Analysis[MaskHistory]):
    help = "density per layer, overlap of each mask with the previous one, and weights ever perturbed"
    title = "Masks over time"
    caption = "Shares of all weights. The overlap is the mean Jaccard index of a mask with the previous one."
    files = ("masks",)
    result_type = MaskHistory
    needs = "run"

    def prepare(self, runs: Sequence[TrainedRun]) -> Prepared:
        """Leave out runs without masks; ValueError if no run has masks."""
        having = [run for run in runs if run.directory.mask_files()]
        left_out = ", ".join(str(run.path) for run in runs if run not in having)
        if not having:
            raise ValueError(f"{left_out}: no masks; train with a mask (ssam-f) and --record-masks true")
        return self, having, [f"left out, without masks: {left_out}"] if left_out else []

    def measure(self, run: TrainedRun, progress: ProgressCallback) -> MaskHistory:
        return masks_over_time(read_masks(run.path))

    @classmethod
    def summary(cls, result: MaskHistory) -> Summary:
        return {
            "masks": len(result.steps),
            "density": number_cell(result.density[-1], percent),
            "ever perturbed": number_cell(result.ever, percent),
            "always perturbed": number_cell(result.always, percent),
            "overlap": number_cell(_mean(result.overlap), percent),
            "overlap by chance": number_cell(_mean(result.overlap_by_chance), percent),
        }

    @classmethod
    def figures(cls, name: str, results: Sequence[LabeledResult[MaskHistory]]) -> list[Figure]:
        panels, lines = {}, []
        for run in results:
            result, layers = run.result, run.result.density_by_layer
            # Steps are category names: masks are unevenly spaced, and each is drawn equally wide.
            panels[run.label] = [run.series([str(step) for step in result.steps], layers, z=layers.values())]
            lines.append(run.series(result.steps[1:], result.overlap))
            by_chance = f"{run.label}, by chance"
            lines.append(run.series(result.steps[1:], result.overlap_by_chance, name=by_chance, faint=True))
        caption = "The share of perturbed weights of each parameter, for each mask."
        x, y, z = Axis("step"), Axis("parameter"), Axis("density")
        density = Figure("mask-density", "Density per layer", caption, x, y, panels, "heatmap", z, (0.0, 1.0))
        caption = "Jaccard index of each mask with the previous one; dotted: random masks of the same densities."
        x, y = Axis("step", whole=True), Axis("overlap")
        return [density, Figure("mask-overlap", "Overlap", caption, x, y, {"": lines})]


def _mean(values: np.ndarray) -> float | None:
    return float(np.nanmean(values)) if np.isfinite(values).any() else None
