"""The difference between SAM's and SGD's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsesam.analysis import GradientDifference, ProgressCallback, gradient_difference
from sparsesam.lab.display import Axis, Figure, Series, number_cell, percent
from sparsesam.lab.inspection.analysis import LabeledResult, RadiusAnalysis, Summary
from sparsesam.lab.inspection.trained_run import TrainedRun

_GROUPS = {"every": "every weight", "inside": "inside the mask", "outside": "outside the mask"}


@dataclass(frozen=True)
class GradientAnalysis(RadiusAnalysis[GradientDifference]):
    help = "difference between SAM's and SGD's gradient for each weight, inside and outside the mask"
    title = "Gradient difference"
    caption = "The share of weights with r < 0, among those with a defined r."
    files = ("gradients",)
    result_type = GradientDifference

    def measure(self, run: TrainedRun, progress: ProgressCallback) -> GradientDifference:
        return gradient_difference(run.objective, masks=run.masks, **self.options)

    @classmethod
    def summary(cls, result: GradientDifference) -> Summary:
        groups = {title: getattr(result, name) for name, title in _GROUPS.items()}
        return {
            **{f"r < 0, {title}": number_cell(of and of.share_below_zero, percent) for title, of in groups.items()},
            "median r": result.every.quantiles["0.5"],
            "gradient norm": result.gradient_norm,
            "rho": result.rho,
        }

    @classmethod
    def figures(cls, name: str, results: Sequence[LabeledResult[GradientDifference]]) -> list[Figure]:
        panels: dict[str, list[Series]] = {}
        bars = []
        for run in results:
            middles = (run.result.edges[1:] + run.result.edges[:-1]) / 2
            for group, title in _GROUPS.items():
                if (found := getattr(run.result, group)) is not None:
                    line = run.series(middles, found.histogram / max(found.weights, 1))
                    panels.setdefault(title, []).append(line)
            layers = run.result.layers
            bars.append(run.series(layers, [100 * layer.share_below_zero for layer in layers.values()]))
        caption = (
            "r = log10 |(g_SAM − g_SGD) / g_SGD| of each weight. Left of 0, the difference is smaller than the "
            "gradient itself: the perturbation matters little there."
        )
        x, y = Axis("r"), Axis("share of weights per bin")
        histogram = Figure("gradient-difference", "Histogram of r", caption, x, y, panels)
        caption = "The share of each layer’s weights with r < 0."
        x, y = Axis("parameter"), Axis("share with r < 0 (%)")
        return [histogram, Figure("gradient-difference-layers", "By layer", caption, x, y, {"": bars}, kind="bars")]
