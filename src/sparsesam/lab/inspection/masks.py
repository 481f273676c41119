"""How the recorded masks of a run change during training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparsesam.analysis import MaskHistory, ProgressCallback, masks_over_time
from sparsesam.lab.display import Axis, Figure, Series, number_cell, percent
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
        reasons = [_why_no_masks(run) for run in runs]
        if all(reasons):
            raise ValueError("; ".join(reasons))
        having = [run for run, reason in zip(runs, reasons, strict=True) if not reason]
        return self, having, [f"left out: {reason}" for reason in reasons if reason]

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
        caption = "The share of perturbed weights of each parameter, for each mask."
        x, y, z = Axis("step"), Axis("parameter"), Axis("density")
        panels = {run.label: [_density(run)] for run in results}
        density = Figure("mask-density", "Density per layer", caption, x, y, panels, "heatmap", z, (0.0, 1.0))
        caption = "Jaccard index of each mask with the previous one; dotted: random masks of the same densities."
        panels = {"": [series for run in results for series in _overlap(run)]}
        return [density, Figure("mask-overlap", "Overlap", caption, Axis("step", whole=True), Axis("overlap"), panels)]


def _why_no_masks(run: TrainedRun) -> str:
    if run.directory.mask_files():
        return ""
    if not run.config.optimizer.startswith("ssam"):
        return f"{run.path} has no masks, because its optimizer is {run.config.optimizer}"
    return f"{run.path} recorded no masks; train it with --record-masks true"


def _density(run: LabeledResult[MaskHistory]) -> Series:
    layers = run.result.density_by_layer
    # Steps are category names: masks are unevenly spaced, and each is drawn equally wide.
    return run.series([str(step) for step in run.result.steps], layers, z=layers.values())


def _overlap(run: LabeledResult[MaskHistory]) -> list[Series]:
    steps, result = run.result.steps[1:], run.result
    chance = run.series(steps, result.overlap_by_chance, name=f"{run.label}, by chance", faint=True)
    return [run.series(steps, result.overlap), chance]


def _mean(values: np.ndarray) -> float | None:
    return float(np.nanmean(values)) if np.isfinite(values).any() else None
