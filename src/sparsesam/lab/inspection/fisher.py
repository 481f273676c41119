"""How well Fisher information agrees with the Hessian's diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sparsesam.analysis import FisherAgreement, fisher_vs_hessian, select_parameters
from sparsesam.lab.display import Axis, Cell, Figure, Series, number_cell, percent
from sparsesam.lab.experiment.setting_types import option
from sparsesam.lab.inspection.analysis import LayerAnalysis, Measured, Progress
from sparsesam.lab.inspection.trained_run import TrainedRun

#: With more weights, the exact diagonal takes too long: one product for each.
EXACT_UP_TO = 5000


@dataclass(frozen=True)
class FisherAnalysis(LayerAnalysis[FisherAgreement]):
    help = "agreement of the Fisher information with the Hessian's diagonal"
    title = "Fisher information and Hessian"
    caption = "Correlation of the Fisher information with the Hessian’s diagonal h, and with its magnitude |h|."
    files = ("fisher", "fisher-layers")
    result_type = FisherAgreement

    probes: int | None = option(
        None, f"random vectors for the Hessian's diagonal; default exact up to {EXACT_UP_TO} weights, else 100"
    )
    labels: Literal["data", "sampled"] = option("data", "labels of the Fisher information")

    def measure(self, subject: TrainedRun, progress: Progress) -> FisherAgreement:
        weights = sum(p.numel() for p in select_parameters(subject.model, self.patterns).values())
        probes = 100 if self.probes is None and weights > EXACT_UP_TO else self.probes
        return fisher_vs_hessian(
            subject.objective,
            probes=probes,
            exact_up_to=EXACT_UP_TO,
            labels=self.labels,
            parameters=self.patterns,
            seed=subject.on.seed,
        )

    @classmethod
    def summary(cls, result: FisherAgreement) -> dict[str, Cell]:
        kept = {f"kept in common at {s}": number_cell(one, percent) for s, one in result.kept_in_common.items()}
        return {
            "Pearson, |h|": number_cell(result.pearson_magnitude),
            "Spearman, |h|": number_cell(result.spearman_magnitude),
            "Pearson, h": number_cell(result.pearson),
            "h < 0": number_cell(result.negative_share, percent),
            **kept,
            "weights": number_cell(result.weights),
            "Hessian’s diagonal": Cell(result.hessian),
        }

    @classmethod
    def figures(cls, name: str, measured: Sequence[Measured[FisherAgreement]]) -> list[Figure]:
        where = ", some layers" if name.endswith("-layers") else ""
        scatter = Figure(
            name=f"{name}-scatter",
            title=f"Fisher information and |h|{where}",
            caption="Up to 2000 weights. Pairs with a zero are not on the logarithmic axes.",
            kind="points",
            x=Axis("Fisher information", log=True),
            y=Axis("|h|", log=True),
            panels={one.label: [_scatter(one)] for one in measured},
        )
        sparsities = [float(sparsity) for sparsity in measured[0].result.kept_in_common]
        chance = Series("by chance", "ink", sparsities, [100 * (1 - one) for one in sparsities], faint=True)
        kept = Figure(
            name=f"{name}-kept",
            title=f"Weights kept in common{where}",
            caption="Of the weights that Fisher information keeps, the share that |h| would keep too.",
            x=Axis("sparsity"),
            y=Axis("kept by both (%)"),
            panels={"": [*(_kept(one) for one in measured), chance]},
        )
        return [scatter, kept]


def _scatter(one: Measured[FisherAgreement]) -> Series:
    pairs = [(fisher, abs(h)) for fisher, h in one.result.scatter.tolist() if fisher > 0 and h != 0]
    return one.series([fisher for fisher, _ in pairs], [h for _, h in pairs])


def _kept(one: Measured[FisherAgreement]) -> Series:
    kept = one.result.kept_in_common
    return one.series([float(sparsity) for sparsity in kept], [100 * share for share in kept.values()])
