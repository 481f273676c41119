"""The largest loss within rho of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sparsesam.analysis import AnalysisResult, ProgressCallback, Sharpness, sharpness
from sparsesam.lab.display import Axis, Figure, Series
from sparsesam.lab.experiment.setting_types import option
from sparsesam.lab.inspection.analysis import LabeledResult, RadiusAnalysis, Summary, every_and_masked
from sparsesam.lab.inspection.trained_run import TrainedRun


@dataclass(frozen=True)
class SharpnessResult(AnalysisResult):
    every: Sharpness
    masked: Sharpness | None  # None for runs without a mask


@dataclass(frozen=True)
class SharpnessAnalysis(RadiusAnalysis[SharpnessResult]):
    help = "the largest increase of the loss within rho, for all weights and for those of the mask"
    title = "Sharpness"
    caption = "The largest increase of the loss that gradient ascent found within rho: a lower bound on the maximum."
    files = ("sharpness",)
    result_type = SharpnessResult

    steps: int = option(20, "gradient ascent steps")

    def measure(self, run: TrainedRun, progress: ProgressCallback) -> SharpnessResult:
        measure = partial(sharpness, run.objective, seed=run.on.seed, **self.options)
        return SharpnessResult(*every_and_masked(run, progress, measure))

    @classmethod
    def summary(cls, result: SharpnessResult) -> Summary:
        row: Summary = {"loss": result.every.loss}
        for label, measured in (("every weight", result.every), ("mask only", result.masked)):
            row[f"increase, {label}"] = None if measured is None else measured.increase
            row[f"by SAM’s step, {label}"] = None if measured is None else measured.one_step
        return {**row, "rho": result.every.rho}

    @classmethod
    def figures(cls, name: str, results: Sequence[LabeledResult[SharpnessResult]]) -> list[Figure]:
        panels: dict[str, list[Series]] = {}
        for run in results:
            for title, found in (("every weight", run.result.every), ("the mask’s weights", run.result.masked)):
                if found is not None:
                    line = run.series(range(len(found.path)), [loss - found.loss for loss in found.path])
                    panels.setdefault(title, []).append(line)
        caption = "The largest increase of the loss after each gradient ascent step."
        x, y = Axis("gradient ascent steps", whole=True), Axis("increase of the loss")
        return [Figure("sharpness-path", "Gradient ascent", caption, x, y, panels)]
