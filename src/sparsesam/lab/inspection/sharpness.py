"""How far the loss rises within a ball around the weights, with and without the mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsesam.analysis import sharpness
from sparsesam.lab.inspection.base import Analysis, Progress, number, usable_masks, with_shared_rho
from sparsesam.lab.inspection.options import option
from sparsesam.lab.inspection.run import Run


@dataclass(frozen=True)
class Sharpness(Analysis):
    help = "the largest rise of the loss within rho, over every weight and over those of the mask"

    rho: float | None = option(None, "radius; default the first run's")
    steps: int = option(20, "gradients of the ascent")
    starts: int = option(1, "ascents; further ones begin at random points")

    @property
    def name(self) -> str:
        return "sharpness"

    def prepare(self, runs: Sequence[Run]) -> tuple[Sharpness, Sequence[Run]]:
        return with_shared_rho(self, runs)

    def measure(self, run: Run, progress: Progress) -> dict[str, Any]:
        assert self.rho is not None
        masks = usable_masks(run)
        common: dict[str, Any] = {"steps": self.steps, "starts": self.starts, "seed": run.on.seed}
        every = sharpness(run.objective, self.rho, **common)
        progress(1, 2)
        masked = None if masks is None else sharpness(run.objective, self.rho, masks=masks, **common)
        progress(2, 2)
        return {"every": every.to_dict(), "masked": None if masked is None else masked.to_dict()}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        rows = {"rho": number(result["every"]["rho"]), "loss": number(result["every"]["loss"])}
        for label, key in (("every weight", "every"), ("mask only", "masked")):
            found = result[key]
            rows[f"rise, {label}"] = "–" if found is None else number(found["increase"])
            rows[f"rise by SAM's step, {label}"] = "–" if found is None else number(found["one_step"])
        return rows
