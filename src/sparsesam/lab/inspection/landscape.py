"""The loss around a run, or between two."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparsesam.analysis import Landscape as Result
from sparsesam.analysis import hessian_eigenvalues, loss_between, loss_landscape
from sparsesam.lab.experiment.errors import Interrupted
from sparsesam.lab.inspection.base import Analysis, Progress, number
from sparsesam.lab.inspection.options import option
from sparsesam.lab.inspection.run import Run, check_fits


@dataclass(frozen=True)
class Landscape(Analysis):
    help = "the loss around the weights, or on the line between two runs"

    dimensions: Literal[1, 2] = option(2, "a line or a square")
    points: int | None = option(None, "in each dimension; default 50, or 51 with --between")
    span: list[float] | None = option(None, "first and last point; default -1 1, or 0 1 with --between", nargs=2)
    along: Literal["random", "eigenvectors"] = option(
        "random", "filter-normalized random directions, or the Hessian's leading eigenvectors (unit length)"
    )
    one_dimensional: Literal["ignore", "normalize"] = option(
        "ignore", "whether random directions move biases and normalization parameters"
    )
    between: bool = option(False, "from the first run to the second instead; running statistics are interpolated too")
    other: Run | None = None

    def __post_init__(self) -> None:
        if self.between and self.along == "eigenvectors":
            raise ValueError("along must be random with --between, got eigenvectors; the line is given by the two runs")

    @property
    def name(self) -> str:
        kind = "between" if self.between else "eigenvectors" if self.along == "eigenvectors" else f"{self.dimensions}d"
        return f"landscape-{kind}"

    def prepare(self, runs: Sequence[Run]) -> tuple[Landscape, Sequence[Run]]:
        different = sorted({run.config.model for run in runs})
        if len(different) > 1:
            raise ValueError(
                f"runs must be of one model to have the same directions, got {', '.join(different)}; "
                "analyze them one after the other"
            )
        if not self.between:
            return self, runs
        if len(runs) != 2:
            raise ValueError(f"--between needs two runs, got {len(runs)}")
        return dataclasses.replace(self, other=runs[1]), runs[:1]

    def measure(self, run: Run, progress: Progress) -> dict[str, Any]:
        state = run.directory.analyses / f"{self.name}.unfinished.npz"
        try:
            result = self._result(run, progress, state)
        except KeyboardInterrupt:
            raise Interrupted(f"the points so far are in {state}; the same command goes on") from None
        state.unlink(missing_ok=True)
        return result.to_dict()

    def _result(self, run: Run, progress: Progress, state: Path) -> Result:
        low, high = self.span or ((0.0, 1.0) if self.between else (-1.0, 1.0))
        common: dict[str, Any] = {"span": (low, high), "state_file": state, "progress": progress}
        if self.other is not None:
            check_fits(run.model, self.other)
            return loss_between(run.objective, run.weights, self.other.weights, points=self.points or 51, **common)
        common |= {"points": self.points or 50, "dimensions": self.dimensions}
        if self.along == "random":
            return loss_landscape(run.objective, seed=run.on.seed, one_dimensional=self.one_dimensional, **common)
        spectrum = hessian_eigenvalues(run.objective, self.dimensions, seed=run.on.seed)
        found = loss_landscape(run.objective, directions=spectrum.vectors, **common)
        values = ", ".join(f"{value:.4g}" for value in spectrum.eigenvalues)
        return dataclasses.replace(
            found, kind="Hessian eigenvectors", notes=[*found.notes, f"eigenvalues {values}", *spectrum.notes]
        )

    def made(self, run: Run) -> dict[str, Any]:
        return run.made() | ({} if self.other is None else {"other": str(self.other.path)})

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        rows = result["loss"] if result["y"] else [result["loss"]]
        finite = [value for row in rows for value in row if value is not None]
        center = "loss at the first run" if self.between else "loss at the center"
        return {
            center: number(result["center_loss"]),
            "smallest": number(min(finite, default=None)),
            "largest": number(max(finite, default=None)),
            "points": str(sum(map(len, rows))),
            "not finite": str(result["not_finite"]),
            "normalization statistics": result["measured_on"]["statistics"],
        }
