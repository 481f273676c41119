"""The generalization bound of theorem 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sparsesam.analysis import AnalysisResult, GeneralizationBound, ProgressCallback, generalization_bound
from sparsesam.lab.display import Axis, Figure
from sparsesam.lab.experiment.setting_types import option
from sparsesam.lab.inspection.analysis import LabeledResult, RadiusAnalysis, Summary, every_and_masked
from sparsesam.lab.inspection.trained_run import TrainedRun

_TERMS = ("dimension term", "confidence term", "remainder")


@dataclass(frozen=True)
class BoundResult(AnalysisResult):
    every: GeneralizationBound
    masked: GeneralizationBound | None  # None for runs without a mask


@dataclass(frozen=True)
class BoundAnalysis(RadiusAnalysis[BoundResult]):
    help = "the bound of theorem 3 term by term, for all weights and for those of the mask"
    title = "Generalization bound"
    caption = "Test loss ≤ largest loss within rho + complexity. Vacuous if not below the loss of a uniform prediction."
    files = ("bound",)
    result_type = BoundResult

    delta: float = option(0.05, "the bound holds with probability 1 - delta")
    steps: int = option(20, "gradient ascent steps to find the largest loss")

    def measure(self, run: TrainedRun, progress: ProgressCallback) -> BoundResult:
        if run.on.split != "train":
            raise ValueError(f"split must be train: the bound is a function of the training loss, got {run.on.split}")
        n, classes = run.batches.count, run.splits.num_classes
        measure = partial(generalization_bound, run.objective, n=n, classes=classes, **self.options)
        return BoundResult(*every_and_masked(run, progress, measure))

    @classmethod
    def summary(cls, result: BoundResult) -> Summary:
        every, masked = result.every, result.masked
        return {
            "bound": every.bound,
            "= largest loss within rho": every.max_loss,
            "+ complexity": every.complexity,
            "loss of a uniform prediction": every.threshold,
            "informative": "no, vacuous" if every.vacuous else "yes",
            "bound, mask only": None if masked is None else masked.bound,
            **{name: getattr(every, name.replace(" ", "_")) for name in (*_TERMS, "k", "n")},
            "||w||²": every.squared_norm,
        }

    @classmethod
    def figures(cls, name: str, results: Sequence[LabeledResult[BoundResult]]) -> list[Figure]:
        bars = []
        for run in results:
            for label, bound in ((run.label, run.result.every), (f"{run.label} (masked)", run.result.masked)):
                if bound is not None:
                    heights = [getattr(bound, term.replace(" ", "_")) for term in _TERMS]
                    bars.append(run.series(_TERMS, heights, name=label, faint=bound is run.result.masked))
        caption = "complexity = sqrt((dimension + confidence + remainder) / (n − 1))."
        x, y = Axis("term"), Axis("value", log=True)
        return [Figure("bound-terms", "Terms of the complexity", caption, x, y, {"": bars}, kind="bars")]
