"""The loss around the weights of a run, or between two runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
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
from sparsesam.lab.display import Axis, Cell, Figure, Series
from sparsesam.lab.display.figure import needs_log
from sparsesam.lab.experiment.errors import Interrupted
from sparsesam.lab.experiment.setting_types import option
from sparsesam.lab.inspection.analysis import Analysis, LabeledResult, Prepared, Summary
from sparsesam.lab.inspection.trained_run import TrainedRun

_SAME_NUMBERS = "The same random numbers for all runs, scaled to each run’s own filters."


@dataclass(frozen=True)
class LandscapeAnalysis(Analysis[Landscape]):
    help = "the loss around the weights, or on the line between two runs"
    title = "Loss landscapes"
    caption = "The loss at the run’s weights, and the smallest and largest loss on the grid."
    files = ("landscape-2d", "landscape-eigenvectors", "landscape-1d", "landscape-between")
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
        kind = "between" if self.between else "eigenvectors" if self.along == "eigenvectors" else f"{self.dimensions}d"
        return f"landscape-{kind}"

    def prepare(self, runs: Sequence[TrainedRun]) -> Prepared:
        different = sorted({run.config.model for run in runs})
        if len(different) > 1:
            raise ValueError(
                f"runs must have the same model to share directions, got {', '.join(different)}; "
                "analyze them separately"
            )
        if not self.between:
            return self, runs, ()
        if len(runs) != 2:
            raise ValueError(f"--between needs two runs, got {len(runs)}")
        return dataclasses.replace(self, other=runs[1]), runs[:1], ()

    def measure(self, run: TrainedRun, progress: ProgressCallback) -> Landscape:
        state = run.directory.analyses / f"{self.name}.unfinished.txt"
        try:
            result = self._landscape(run, progress, state)
        except KeyboardInterrupt:
            raise Interrupted(f"the points so far are in {state}; run the same command to continue") from None
        state.unlink(missing_ok=True)
        return result

    def _landscape(self, run: TrainedRun, progress: ProgressCallback, state: Path) -> Landscape:
        common: dict[str, Any] = {"state_file": state, "progress": progress}
        common |= {name: value for name in ("points", "span") if (value := getattr(self, name)) is not None}
        if self.other is not None:
            return loss_between(run.objective, run.weights, self.other.weights, **common)
        if self.along == "random":
            directions = random_directions(run.model, self.dimensions, seed=run.on.seed)
            return loss_landscape(run.objective, directions, **common)
        spectrum = hessian_eigenvalues(run.objective, self.dimensions, seed=run.on.seed)
        found = loss_landscape(run.objective, spectrum.vectors, **common)
        values = ", ".join(f"{value:.4g}" for value in spectrum.eigenvalues)
        return dataclasses.replace(found, notes=[f"eigenvalues {values}", *spectrum.notes])

    def origin(self, run: TrainedRun) -> dict[str, Any]:
        other = {} if self.other is None else {"other": str(self.other.path)}
        return {**super().origin(run), **other}

    @classmethod
    def summary(cls, result: Landscape) -> Summary:
        finite: list[float] = result.loss[np.isfinite(result.loss)].tolist()
        return {
            "loss at the weights": result.center_loss,
            "smallest": min(finite, default=None),
            "largest": max(finite, default=None),
            "points": result.loss.size,
            "not finite": result.not_finite,
            "normalization statistics": Cell(result.measured_on.statistics),
        }

    @classmethod
    def figures(cls, name: str, results: Sequence[LabeledResult[Landscape]]) -> list[Figure]:
        lines = [run for run in results if not run.result.y.size]
        surfaces = [run for run in results if run.result.y.size]
        return [*_surface_figures(name, surfaces), *([_line_figure(name, lines)] if lines else [])]


def _line_figure(name: str, results: Sequence[LabeledResult[Landscape]]) -> Figure:
    title, caption, axis = "Loss along a line", _SAME_NUMBERS, "distance along the direction"
    if name == "landscape-between":
        title, caption = "Loss between two runs", "On the straight line from one run’s weights (0) to another’s (1)."
        axis = "position from first run (0) to second (1)"
    series = [
        run.series(run.result.x, run.result.loss, name=f"{run.label} to {run.other}" if run.other else "")
        for run in results
    ]
    return Figure(f"{name}-line", title, caption, Axis(axis), Axis("loss"), {"": series})


def _surface_figures(name: str, results: Sequence[LabeledResult[Landscape]]) -> list[Figure]:
    """Returns surface, contours and a cut, with all runs on one scale so that they can be compared."""
    losses = [loss for run in results for loss in run.result.loss[np.isfinite(run.result.loss)].tolist()]
    if not losses:
        return []
    log, low, high = needs_log(losses), min(losses), max(losses)
    direction, words, end = "direction", "filter-normalized random directions", ""
    if name == "landscape-eigenvectors":
        direction, words, end = "eigenvector", "the Hessian’s two leading eigenvectors", " along eigenvectors"
    x, y, z = Axis(f"{direction} 1"), Axis(f"{direction} 2"), Axis("log10 of the loss" if log else "loss")
    series = []
    for run in results:
        loss = np.log10(np.where(run.result.loss > 0, run.result.loss, np.nan)) if log else run.result.loss
        series.append(run.series(run.result.x, run.result.y, z=loss))
    panels = {surface.name: [surface] for surface in series}
    range_z = (math.log10(low), math.log10(high)) if log else (low, high)
    scale = f"Along {words}; all runs on one scale."
    turn = f"{scale} On the page, drag to rotate it, or use the arrow keys."
    middle = f"{scale} The run’s weights are in the middle."
    cut = "The row of each surface nearest to the run’s weights: the wider, the flatter."
    return [
        Figure(f"{name}-surface", f"Surface{end}", turn, x, y, panels, "surface", z, range_z),
        Figure(f"{name}-contours", f"Contours{end}", middle, x, y, panels, "contour", z, range_z),
        Figure(f"{name}-cut", f"Cut through the middle{end}", cut, x, z, {"": [_cut(surface) for surface in series]}),
    ]


def _cut(surface: Series) -> Series:
    assert surface.z is not None
    row = min(range(len(surface.y)), key=lambda place: abs(surface.y[place]))
    return dataclasses.replace(surface, y=surface.z[row], z=None)
