"""How much SAM's gradient differs from SGD's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sparsesam.analysis import gradient_difference
from sparsesam.lab.inspection.base import Analysis, Progress, number, share, with_shared_rho
from sparsesam.lab.inspection.options import option
from sparsesam.lab.inspection.run import Run


@dataclass(frozen=True)
class Gradients(Analysis):
    help = "the difference of SAM's gradient from SGD's, weight by weight, inside and outside the mask"

    rho: float | None = option(None, "length of SAM's ascent; default the first run's")
    logarithm: Literal["10", "e"] = option("10", "base of the logarithm in r")

    @property
    def name(self) -> str:
        return "gradients"

    def prepare(self, runs: Sequence[Run]) -> tuple[Gradients, Sequence[Run]]:
        return with_shared_rho(self, runs)

    def measure(self, run: Run, progress: Progress) -> dict[str, Any]:
        assert self.rho is not None
        return gradient_difference(run.objective, self.rho, masks=run.masks, logarithm=self.logarithm).to_dict()

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        rows = {"rho": number(result["rho"]), "norm of the gradient": number(result["gradient_norm"])}
        groups = {"every weight": result["every"], "inside the mask": result["inside"], "outside": result["outside"]}
        for label, group in groups.items():
            rows[f"r < 0, {label}"] = "–" if group is None else share(group["share_below_zero"])
            rows[f"median r, {label}"] = "–" if group is None else number(group["quantiles"]["0.5"])
        return rows
