"""The largest loss within rho of the weights, and theorem 3's bound, which starts from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from sparsesam.analysis import AnalysisResult, GeneralizationBound, Sharpness, generalization_bound, sharpness
from sparsesam.analysis.theory import CAVEATS
from sparsesam.lab.display import Axis, Cell, Figure, Series, number_cell, significant
from sparsesam.lab.experiment.setting_types import option
from sparsesam.lab.inspection.analysis import Analysis, Measured, Progress
from sparsesam.lab.inspection.trained_run import TrainedRun

MeasureT = TypeVar("MeasureT")
_TERMS = {"dimension": "dimension_term", "confidence": "confidence_term", "remainder": "remainder"}


def every_and_masked(
    run: TrainedRun, progress: Progress, measure: Callable[..., MeasureT]
) -> tuple[MeasureT, MeasureT | None]:
    """``measure()``, of every weight, and ``measure(masks=masks)``, None for a run whose masks keep no weight."""
    masks = run.masks or {}
    every = measure()
    progress(1, 2)
    masked = measure(masks=masks) if any(bool(mask.any()) for mask in masks.values()) else None
    progress(2, 2)
    return every, masked


@dataclass(frozen=True)
class SharpnessResult(AnalysisResult):
    """``masked`` is None for runs without a mask."""

    every: Sharpness
    masked: Sharpness | None


@dataclass(frozen=True)
class SharpnessAnalysis(Analysis[SharpnessResult]):
    help = "the largest increase of the loss within rho, over every weight and over those of the mask"
    title = "Sharpness"
    caption = "The largest increase of the loss that gradient ascent found within rho: a lower bound of the true one."
    files = ("sharpness",)
    result_type = SharpnessResult

    rho: float | None = option(None, "radius; default the first run's")
    steps: int = option(20, "gradients of the ascent")

    def measure(self, subject: TrainedRun, progress: Progress) -> SharpnessResult:
        assert self.rho is not None
        measure = partial(sharpness, subject.objective, self.rho, steps=self.steps, seed=subject.on.seed)
        return SharpnessResult(*every_and_masked(subject, progress, measure))

    @classmethod
    def summary(cls, result: SharpnessResult) -> dict[str, Cell]:
        row = {"loss": number_cell(result.every.loss)}
        for label, measured in (("every weight", result.every), ("mask only", result.masked)):
            row[f"increase, {label}"] = number_cell(None if measured is None else measured.increase)
            row[f"by SAM’s step, {label}"] = number_cell(None if measured is None else measured.one_step)
        return {**row, "rho": number_cell(result.every.rho)}

    @classmethod
    def figures(cls, name: str, measured: Sequence[Measured[SharpnessResult]]) -> list[Figure]:
        panels = {"every weight": [_path(one, one.result.every) for one in measured]}
        masked = [_path(one, one.result.masked) for one in measured if one.result.masked is not None]
        if masked:
            panels["the mask’s weights"] = masked
        caption = "The largest increase of the loss after each gradient of the ascent."
        x, y = Axis("gradients", whole=True), Axis("increase of the loss")
        return [Figure("sharpness-path", "Gradient ascent", caption, x, y, panels)]


def _path(one: Measured[SharpnessResult], measured: Sharpness) -> Series:
    return one.series(range(len(measured.path)), [loss - measured.loss for loss in measured.path])


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
        assert self.rho is not None
        measure = partial(
            generalization_bound,
            subject.objective,
            self.rho,
            n=subject.batches.count,
            delta=self.delta,
            classes=subject.splits.num_classes,
            steps=self.steps,
        )
        return BoundResult(*every_and_masked(subject, progress, measure))

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
        caption = "complexity = sqrt((dimension + confidence + remainder) / (n − 1))."
        x, y = Axis("term"), Axis("value", log=True)
        panels = {"": [_terms(one, bound) for one in measured for bound in one.result.bounds]}
        return [Figure("bound-terms", "Terms of the complexity", caption, x, y, panels, kind="bars")]

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
