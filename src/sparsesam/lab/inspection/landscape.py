"""The loss around the weights of a run, or between two runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sparsesam.analysis import (
    Landscape,
    ProgressCallback,
    hessian_eigenvalues,
    loss_between,
    loss_landscape,
    random_directions,
)
from sparsesam.lab.display import Axis, Figure
from sparsesam.lab.display.figure import needs_log
from sparsesam.lab.experiment.errors import Interrupted
from sparsesam.lab.experiment.setting_types import option
from sparsesam.lab.inspection.analysis import Analysis, LabeledResult, Prepared, Summary
from sparsesam.lab.inspection.trained_run import TrainedRun

_KINDS = {
    ("random", 1): "1d",
    ("random", 2): "2d",
    ("eigenvectors", 1): "eigenvector",
    ("eigenvectors", 2): "eigenvectors",
}
#: Axis and caption of the figures of a line.
_LINES = {
    "landscape-1d": ("distance along the direction", "The same random numbers for all runs, scaled to filters."),
    "landscape-eigenvector": ("distance", "Along the eigenvector of the Hessian’s largest eigenvalue."),
    "landscape-between": ("position", "On the straight line from one run’s weights (0) to another’s (1)."),
}


@dataclass(frozen=True)
class LandscapeAnalysis(Analysis[Landscape]):
    help = "the loss around the weights, or on the line between two runs"
    title = "Loss landscapes"
    caption = "The loss at the run’s weights, and the smallest and largest loss on the grid."
    files = ("landscape-2d", "landscape-eigenvectors", "landscape-1d", "landscape-eigenvector", "landscape-between")
    result_type = Landscape

    dimensions: Literal[1, 2] = option(2, "a line or a square")
    points: int | None = option(None, "points per dimension; default 50, or 51 with --between")
    span: tuple[float, float] | None = option(None, "first and last point; default [-1,1], or [0,1] with --between")
    along: Literal["random", "eigenvectors"] = option(
        "random", "filter-normalized random directions, or the Hessian's leading eigenvectors (unit length)"
    )
    between: bool = option(False, "line from the first run to the second; interpolates running statistics too")
    other: TrainedRun | None = None

    def __post_init__(self) -> None:
        if self.between and self.along == "eigenvectors":
            raise ValueError("along must be random with --between, got eigenvectors; the two runs define the line")

    @property
    def name(self) -> str:
        return f"landscape-{'between' if self.between else _KINDS[self.along, self.dimensions]}"

    def prepare(self, runs: Sequence[TrainedRun]) -> Prepared:
        if not self.between:
            return self, runs, ()
        if len(runs) != 2:
            raise ValueError(f"--between needs two runs, got {len(runs)}")
        first, second = ({name: tensor.shape for name, tensor in run.weights.items()} for run in runs)
        if first != second:
            models = " and ".join(f"{run.config.model} on {run.config.dataset}" for run in runs)
            raise ValueError(f"--between needs two runs with weights of the same names and shapes, got {models}")
        return dataclasses.replace(self, other=runs[1]), runs[:1], ()

    def measure(self, run: TrainedRun, progress: ProgressCallback) -> Landscape:
        state = run.directory.analyses / f"{self.name}.unfinished.txt"
        common: dict[str, Any] = {"state_file": state, "progress": progress}
        common |= {name: value for name in ("points", "span") if (value := getattr(self, name)) is not None}
        try:
            result = self._landscape(run, common)
        except KeyboardInterrupt:
            raise Interrupted(f"the points so far are in {state}; run the same command to continue") from None
        state.unlink(missing_ok=True)
        return result

    def _landscape(self, run: TrainedRun, common: dict[str, Any]) -> Landscape:
        if self.other is not None:
            line = loss_between(run.objective, run.weights, self.other.weights, **common)
            return dataclasses.replace(line, notes=[f"to {self.other.path}", *line.notes])
        if self.along == "random":
            directions = random_directions(run.model, self.dimensions, seed=run.on.seed)
            return loss_landscape(run.objective, directions, **common)
        spectrum = hessian_eigenvalues(run.objective, self.dimensions, seed=run.on.seed)
        found = loss_landscape(run.objective, spectrum.vectors, **common)
        values = ", ".join(f"{value:.4g}" for value in spectrum.eigenvalues)
        return dataclasses.replace(found, notes=[f"eigenvalues {values}", *spectrum.notes])

    @classmethod
    def summary(cls, result: Landscape) -> Summary:
        finite: list[float] = result.loss[np.isfinite(result.loss)].tolist()
        return {
            "loss at the weights": result.center_loss,
            "smallest": min(finite, default=None),
            "largest": max(finite, default=None),
            "points": result.loss.size,
            "not finite": result.not_finite,
            "normalization statistics": result.measured_on.statistics,
        }

    @classmethod
    def figures(cls, name: str, results: Sequence[LabeledResult[Landscape]]) -> list[Figure]:
        """Returns a line, or surface and contours, with all runs on one scale so that they can be compared."""
        if name in _LINES:
            axis, caption = _LINES[name]
            lines = [run.series(run.result.x, run.result.loss) for run in results]
            return [Figure(f"{name}-line", "Loss along a line", caption, Axis(axis), Axis("loss"), {"": lines})]
        losses = [loss for run in results for loss in run.result.loss[np.isfinite(run.result.loss)].tolist()]
        log, low, high = needs_log(losses), min(losses, default=0.0), max(losses, default=1.0)
        axis, end = ("eigenvector", " along eigenvectors") if name == "landscape-eigenvectors" else ("direction", "")
        x, y, z = Axis(f"{axis} 1"), Axis(f"{axis} 2"), Axis("log10 of the loss" if log else "loss")
        panels = {}
        for run in results:
            loss = np.log10(np.where(run.result.loss > 0, run.result.loss, np.nan)) if log else run.result.loss
            panels[run.label] = [run.series(run.result.x, run.result.y, z=loss)]
        range_z = (math.log10(low), math.log10(high)) if log else (low, high)
        scale = "The run’s weights are in the middle; all runs on one scale."
        turn = f"{scale} On the page, drag to rotate it, or use the arrow keys."
        return [
            Figure(f"{name}-surface", f"Surface{end}", turn, x, y, panels, "surface", z, range_z),
            Figure(f"{name}-contours", f"Contours{end}", scale, x, y, panels, "contour", z, range_z),
        ]
