"""How much SAM's gradient differs from SGD's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sparsesam.analysis import GradientDifference, gradient_difference
from sparsesam.lab.display import Axis, Cell, Figure, Series, number_cell, percent
from sparsesam.lab.experiment.setting_types import option
from sparsesam.lab.inspection.analysis import Analysis, Measured, Progress
from sparsesam.lab.inspection.trained_run import TrainedRun

_GROUPS = {"every": "every weight", "inside": "inside the mask", "outside": "outside the mask"}


@dataclass(frozen=True)
class GradientAnalysis(Analysis[GradientDifference]):
    help = "the difference of SAM's gradient from SGD's for each weight, inside and outside the mask"
    title = "Gradient difference"
    caption = "The share of weights with r < 0, among those that have an r."
    files = ("gradients",)
    result_type = GradientDifference

    rho: float | None = option(None, "length of SAM's ascent; default the first run's")
    logarithm: Literal["10", "e"] = option("10", "base of the logarithm in r")

    def measure(self, subject: TrainedRun, progress: Progress) -> GradientDifference:
        assert self.rho is not None
        return gradient_difference(subject.objective, self.rho, masks=subject.masks, logarithm=self.logarithm)

    @classmethod
    def summary(cls, result: GradientDifference) -> dict[str, Cell]:
        groups = {title: getattr(result, name) for name, title in _GROUPS.items()}
        shares = {
            f"r < 0, {title}": number_cell(group and group.share_below_zero, percent) for title, group in groups.items()
        }
        median, norm = number_cell(result.every.quantiles["0.5"]), number_cell(result.gradient_norm)
        return {**shares, "median r": median, "gradient norm": norm, "rho": number_cell(result.rho)}

    @classmethod
    def figures(cls, name: str, measured: Sequence[Measured[GradientDifference]]) -> list[Figure]:
        logarithm = " or ".join(sorted({one.result.logarithm for one in measured}))
        caption = (
            f"r = {logarithm} |(g_SAM − g_SGD) / g_SGD| of each weight. Left of 0, SAM’s gradient differs by less than "
            "the gradient itself: the perturbation matters little there."
        )
        every = {title: _histograms(measured, group) for group, title in _GROUPS.items()}
        panels = {title: panel for title, panel in every.items() if panel}
        x, y = Axis("r"), Axis("share of weights per bin")
        histogram = Figure("gradient-difference", "Histogram of r", caption, x, y, panels)
        caption = "The share of each layer’s weights with r < 0."
        x, y = Axis("parameter"), Axis("share with r < 0 (%)")
        panels = {"": [one.series(one.result.layers, _shares(one.result)) for one in measured]}
        return [histogram, Figure("gradient-difference-layers", "By layer", caption, x, y, panels, kind="bars")]


def _histograms(measured: Sequence[Measured[GradientDifference]], group: str) -> list[Series]:
    series = []
    for one in measured:
        differences = getattr(one.result, group)
        if differences is not None:
            middles = (one.result.edges[1:] + one.result.edges[:-1]) / 2
            series.append(one.series(middles, differences.histogram / max(differences.weights, 1)))
    return series


def _shares(result: GradientDifference) -> list[float]:
    return [100 * layer.share_below_zero for layer in result.layers.values()]
