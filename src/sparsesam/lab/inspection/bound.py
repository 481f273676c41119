"""The generalization bound of theorem 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sparsesam.analysis import AnalysisResult, GeneralizationBound, ProgressCallback, generalization_bound
from sparsesam.lab.display import Axis, Cell, Figure, significant
from sparsesam.lab.experiment.setting_types import option
from sparsesam.lab.inspection.analysis import LabeledResult, RadiusAnalysis, Summary, every_and_masked
from sparsesam.lab.inspection.trained_run import TrainedRun

_TERMS = {"dimension": "dimension_term", "confidence": "confidence_term", "remainder": "remainder"}


@dataclass(frozen=True)
class BoundResult(AnalysisResult):
    """``masked`` is None for runs without a mask."""

    every: GeneralizationBound
    masked: GeneralizationBound | None

    @property
    def bounds(self) -> list[GeneralizationBound]:
        return [self.every, *([] if self.masked is None else [self.masked])]


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
            raise ValueError(
                f"split must be train for the bound, which depends on the training loss, got {run.on.split}"
            )
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
            "informative": Cell("no, vacuous", status="failed") if every.vacuous else Cell("yes", status="finished"),
            "bound, mask only": None if masked is None else masked.bound,
            "dimension term": every.dimension_term,
            "confidence term": every.confidence_term,
            **{name: getattr(every, name) for name in ("remainder", "k", "n", "delta", "rho")},
            "||w||²": every.squared_norm,
        }

    @classmethod
    def figures(cls, name: str, results: Sequence[LabeledResult[BoundResult]]) -> list[Figure]:
        caption = "complexity = sqrt((dimension + confidence + remainder) / (n − 1))."
        bars = [
            run.series(
                _TERMS,
                [getattr(bound, term) for term in _TERMS.values()],
                name=f"{run.label} (masked)" if bound.masked else "",
                faint=bound.masked,
            )
            for run in results
            for bound in run.result.bounds
        ]
        x, y = Axis("term"), Axis("value", log=True)
        return [Figure("bound-terms", "Terms of the complexity", caption, x, y, {"": bars}, kind="bars")]

    @classmethod
    def why_hidden(cls, results: Sequence[LabeledResult[BoundResult]]) -> str:
        bounds = [bound for run in results for bound in run.result.bounds]
        if not all(bound.vacuous for bound in bounds):
            return ""
        least = min(bounds, key=lambda bound: bound.bound)
        return (
            f"Generalization bound (theorem 3): vacuous for every run; the smallest is {significant(least.bound)}, "
            f"while a uniform prediction has a loss of {significant(least.threshold)}. `sparsesam report --bounds` "
            "shows the terms."
        )
