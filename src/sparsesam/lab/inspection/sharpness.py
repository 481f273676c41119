"""How far the loss rises within a ball around the weights, with and without the mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sparsesam.analysis import AnalysisResult, Sharpness, sharpness
from sparsesam.lab.display import Axis, Cell, Figure, Series, number_cell
from sparsesam.lab.experiment.setting_types import option
from sparsesam.lab.inspection.analysis import Analysis, Measured, Progress, every_and_masked
from sparsesam.lab.inspection.trained_run import TrainedRun


@dataclass(frozen=True)
class SharpnessResult(AnalysisResult):
    """``masked`` is None for runs without a mask."""

    every: Sharpness
    masked: Sharpness | None


@dataclass(frozen=True)
class SharpnessAnalysis(Analysis[SharpnessResult]):
    help = "the largest increase of the loss within rho, over every weight and over those of the mask"
    title = "Sharpness"
    caption = "The largest increase of the loss that gradient ascent found within rho: a lower bound of the true one."
    files = ("sharpness",)
    result_type = SharpnessResult

    rho: float | None = option(None, "radius; default the first run's")
    steps: int = option(20, "gradients of the ascent")

    def measure(self, subject: TrainedRun, progress: Progress) -> SharpnessResult:
        assert self.rho is not None
        measure = partial(sharpness, subject.objective, self.rho, steps=self.steps, seed=subject.on.seed)
        return SharpnessResult(*every_and_masked(subject, progress, lambda masks: measure(masks=masks)))

    @classmethod
    def summary(cls, result: SharpnessResult) -> dict[str, Cell]:
        row = {"loss": number_cell(result.every.loss)}
        for label, measured in (("every weight", result.every), ("mask only", result.masked)):
            row[f"increase, {label}"] = number_cell(None if measured is None else measured.increase)
            row[f"by SAM’s step, {label}"] = number_cell(None if measured is None else measured.one_step)
        return {**row, "rho": number_cell(result.every.rho)}

    @classmethod
    def figures(cls, name: str, measured: Sequence[Measured[SharpnessResult]]) -> list[Figure]:
        panels = {
            "every weight": [_path(one, one.result.every) for one in measured],
            "the mask’s weights": [_path(one, one.result.masked) for one in measured if one.result.masked is not None],
        }
        return [
            Figure(
                name="sharpness-path",
                title="Gradient ascent",
                caption="The largest increase of the loss after each gradient of the ascent.",
                x=Axis("gradients", whole=True),
                y=Axis("increase of the loss"),
                panels={title: panel for title, panel in panels.items() if panel},
            )
        ]


def _path(one: Measured[SharpnessResult], measured: Sharpness) -> Series:
    return one.series(range(len(measured.path)), [loss - measured.loss for loss in measured.path])
