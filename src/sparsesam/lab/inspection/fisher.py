"""How well Fisher information stands for the Hessian's diagonal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sparsesam.analysis import fisher_vs_hessian, select_parameters
from sparsesam.lab.inspection.base import Analysis, Progress, number, patterns, share
from sparsesam.lab.inspection.options import option
from sparsesam.lab.inspection.run import Run

#: Beyond so many weights the exact diagonal, one product for each, is not worth its time.
EXACT_UP_TO = 5000


@dataclass(frozen=True)
class Fisher(Analysis):
    help = "agreement of the Fisher information with the Hessian's diagonal"

    probes: int | None = option(
        None, f"random vectors for the Hessian's diagonal; default exact up to {EXACT_UP_TO} weights, else 100"
    )
    labels: Literal["data", "sampled"] = option("data", "labels of the Fisher information")
    layers: str | None = option(None, "only parameters whose names fit a pattern, such as 'layer4.*,fc.*'")

    @property
    def name(self) -> str:
        return "fisher" if self.layers is None else "fisher-layers"

    def measure(self, run: Run, progress: Progress) -> dict[str, Any]:
        chosen = patterns(self.layers, run)
        weights = sum(p.numel() for p in select_parameters(run.model, chosen).values())
        probes = 100 if self.probes is None and weights > EXACT_UP_TO else self.probes
        return fisher_vs_hessian(
            run.objective,
            probes=probes,
            exact_up_to=EXACT_UP_TO,
            labels=self.labels,
            parameters=chosen,
            seed=run.on.seed,
        ).to_dict()

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        kept = {f"kept in common at sparsity {s}": share(value) for s, value in result["kept_in_common"].items()}
        return {
            "Pearson with |h|": number(result["pearson_magnitude"]),
            "Spearman with |h|": number(result["spearman_magnitude"]),
            "Pearson with h": number(result["pearson"]),
            "h < 0": share(result["negative_share"]),
            **kept,
            "weights": f"{result['weights']:,}",
            "Hessian's diagonal": result["hessian"],
        }
