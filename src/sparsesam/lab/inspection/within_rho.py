"""Measurements within rho of the weights: SAM's gradient against SGD's, and the largest loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from sparsesam.analysis import AnalysisResult, GradientDifference, Sharpness, gradient_difference, sharpness
from sparsesam.lab.display import Axis, Figure, Series, number_cell, percent
from sparsesam.lab.experiment.setting_types import option
from sparsesam.lab.inspection.analysis import Analysis, Measured, Progress, Summary
from sparsesam.lab.inspection.trained_run import TrainedRun

MeasureT = TypeVar("MeasureT")
_GROUPS = {"every": "every weight", "inside": "inside the mask", "outside": "outside the mask"}


@dataclass(frozen=True)
class GradientAnalysis(Analysis[GradientDifference]):
    help = "difference between SAM's and SGD's gradient for each weight, inside and outside the mask"
    title = "Gradient difference"
    caption = "The share of weights with r < 0, among those with a defined r."
    files = ("gradients",)

    rho: float | None = option(None, "norm of SAM's perturbation; default the first run's")

    def measure(self, subject: TrainedRun, progress: Progress) -> GradientDifference:
        return gradient_difference(subject.objective, masks=subject.masks, **self.options)

    @classmethod
    def summary(cls, result: GradientDifference) -> Summary:
        groups = {title: getattr(result, name) for name, title in _GROUPS.items()}
        return {
            **{f"r < 0, {title}": number_cell(one and one.share_below_zero, percent) for title, one in groups.items()},
            "median r": result.every.quantiles["0.5"],
            "gradient norm": result.gradient_norm,
            "rho": result.rho,
        }

    @classmethod
    def figures(cls, name: str, measured: Sequence[Measured[GradientDifference]]) -> list[Figure]:
        logarithm = " or ".join(sorted({one.result.logarithm for one in measured}))
        caption = (
            f"r = {logarithm} |(g_SAM − g_SGD) / g_SGD| of each weight. Left of 0, the difference is smaller than the "
            "gradient itself: the perturbation matters little there."
        )
        panels = {title: panel for group, title in _GROUPS.items() if (panel := _histograms(measured, group))}
        x, y = Axis("r"), Axis("share of weights per bin")
        histogram = Figure("gradient-difference", "Histogram of r", caption, x, y, panels)
        caption = "The share of each layer’s weights with r < 0."
        x, y = Axis("parameter"), Axis("share with r < 0 (%)")
        layers = [(one, one.result.layers) for one in measured]
        bars = [one.series(of, [100 * layer.share_below_zero for layer in of.values()]) for one, of in layers]
        return [histogram, Figure("gradient-difference-layers", "By layer", caption, x, y, {"": bars}, kind="bars")]


def _histograms(measured: Sequence[Measured[GradientDifference]], group: str) -> list[Series]:
    series = []
    for one in measured:
        differences, edges = getattr(one.result, group), one.result.edges
        if differences is not None:
            shares = differences.histogram / max(differences.weights, 1)
            series.append(one.series((edges[1:] + edges[:-1]) / 2, shares))
    return series


def every_and_masked(
    run: TrainedRun, progress: Progress, measure: Callable[..., MeasureT]
) -> tuple[MeasureT, MeasureT | None]:
    """Returns ``measure()`` for every weight and ``measure(masks=masks)``, None if the masks keep no weight."""
    masks = run.masks or {}
    every = measure()
    progress(1, 2)
    masked = measure(masks=masks) if any(bool(mask.any()) for mask in masks.values()) else None
    progress(2, 2)
    return every, masked


@dataclass(frozen=True)
class SharpnessResult(AnalysisResult):
    """``masked`` is None for runs without a mask."""

    every: Sharpness
    masked: Sharpness | None


@dataclass(frozen=True)
class SharpnessAnalysis(Analysis[SharpnessResult]):
    help = "the largest increase of the loss within rho, for all weights and for those of the mask"
    title = "Sharpness"
    caption = "The largest increase of the loss that gradient ascent found within rho: a lower bound on the maximum."
    files = ("sharpness",)

    rho: float | None = option(None, "radius; default the first run's")
    steps: int = option(20, "gradient ascent steps")

    def measure(self, subject: TrainedRun, progress: Progress) -> SharpnessResult:
        measure = partial(sharpness, subject.objective, seed=subject.on.seed, **self.options)
        return SharpnessResult(*every_and_masked(subject, progress, measure))

    @classmethod
    def summary(cls, result: SharpnessResult) -> Summary:
        row: Summary = {"loss": result.every.loss}
        for label, measured in (("every weight", result.every), ("mask only", result.masked)):
            row[f"increase, {label}"] = None if measured is None else measured.increase
            row[f"by SAM’s step, {label}"] = None if measured is None else measured.one_step
        return {**row, "rho": result.every.rho}

    @classmethod
    def figures(cls, name: str, measured: Sequence[Measured[SharpnessResult]]) -> list[Figure]:
        panels = {"every weight": [_path(one, one.result.every) for one in measured]}
        masked = [_path(one, one.result.masked) for one in measured if one.result.masked is not None]
        if masked:
            panels["the mask’s weights"] = masked
        caption = "The largest increase of the loss after each gradient ascent step."
        x, y = Axis("gradient ascent steps", whole=True), Axis("increase of the loss")
        return [Figure("sharpness-path", "Gradient ascent", caption, x, y, panels)]


def _path(one: Measured[SharpnessResult], measured: Sharpness) -> Series:
    return one.series(range(len(measured.path)), [loss - measured.loss for loss in measured.path])
