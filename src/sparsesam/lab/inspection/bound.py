"""The generalization bound of theorem 3 for a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from sparsesam.analysis import AnalysisResult, GeneralizationBound, generalization_bound
from sparsesam.analysis.theory import CAVEATS
from sparsesam.lab.display import Axis, Cell, Figure, Series, number_cell, significant
from sparsesam.lab.experiment.setting_types import option
from sparsesam.lab.inspection.analysis import Analysis, Measured, Progress, every_and_masked
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
class BoundAnalysis(Analysis[BoundResult]):
    help = "the bound of theorem 3 with every term, over every weight and over those of the mask"
    title = "Generalization bound"
    caption = "Test loss ≤ largest loss within rho + complexity. It is vacuous if not below the loss of a guess."
    files = ("bound",)
    result_type = BoundResult

    rho: float | None = option(None, "radius; default the first run's")
    delta: float = option(0.05, "the bound holds with probability 1 - delta")
    steps: int = option(20, "gradients of the ascent that finds the largest loss")

    def measure(self, subject: TrainedRun, progress: Progress) -> BoundResult:
        if subject.on.split != "train":
            raise ValueError(
                f"split must be train for the bound, which depends on the training loss, got {subject.on.split}"
            )
        return BoundResult(*every_and_masked(subject, progress, lambda masks: self._bound(subject, masks)))

    def _bound(self, run: TrainedRun, masks: Mapping[str, Tensor] | None) -> GeneralizationBound:
        assert self.rho is not None
        n = run.batches.count
        bound = generalization_bound(
            run.objective,
            self.rho,
            n=n,
            delta=self.delta,
            classes=run.splits.num_classes,
            masks=masks,
            steps=self.steps,
        )
        if run.objective.samples < n:
            note = f"the training loss is that of {run.objective.samples} of the {n} images (--samples null: of all)"
            bound = dataclasses.replace(bound, notes=[*bound.notes, note])
        return bound

    @classmethod
    def summary(cls, result: BoundResult) -> dict[str, Cell]:
        every, masked = result.every, result.masked
        return {
            "bound": number_cell(every.bound),
            "= largest loss within rho": number_cell(every.max_loss),
            "+ complexity": number_cell(every.complexity),
            "loss of a guess": number_cell(every.threshold),
            "informative": Cell("no, vacuous", status="failed") if every.vacuous else Cell("yes", status="finished"),
            "bound, mask only": number_cell(None if masked is None else masked.bound),
            "dimension term": number_cell(every.dimension_term),
            "confidence term": number_cell(every.confidence_term),
            "remainder": number_cell(every.remainder),
            "k": number_cell(every.k),
            "n": number_cell(every.n),
            "delta": number_cell(every.delta),
            "rho": number_cell(every.rho),
            "||w||²": number_cell(every.squared_norm),
        }

    @classmethod
    def figures(cls, name: str, measured: Sequence[Measured[BoundResult]]) -> list[Figure]:
        return [
            Figure(
                name="bound-terms",
                title="Terms of the complexity",
                caption="complexity = sqrt((dimension + confidence + remainder) / (n − 1)).",
                kind="bars",
                x=Axis("term"),
                y=Axis("value", log=True),
                panels={"": [_terms(one, bound) for one in measured for bound in one.result.bounds]},
            )
        ]

    @classmethod
    def notes(cls, measured: Sequence[Measured[BoundResult]]) -> list[str]:
        """Of every bound; notes on a run's own numbers are in its file."""
        return list(CAVEATS)

    @classmethod
    def all_vacuous(cls, measured: Sequence[Measured[BoundResult]]) -> str:
        """One sentence instead of the section where no bound is informative, else empty."""
        bounds = [bound for one in measured for bound in one.result.bounds]
        if not bounds or not all(bound.vacuous for bound in bounds):
            return ""
        least = min(bounds, key=lambda bound: bound.bound)
        return (
            f"Generalization bound (theorem 3): vacuous for every run; the smallest is {significant(least.bound)}, "
            f"while a guess has a loss of {significant(least.threshold)}."
        )


def _terms(one: Measured[BoundResult], bound: GeneralizationBound) -> Series:
    name = f"{one.label} (masked)" if bound.masked else one.label
    return one.series(_TERMS, [getattr(bound, term) for term in _TERMS.values()], name=name, faint=bound.masked)
