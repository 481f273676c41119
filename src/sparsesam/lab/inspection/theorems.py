"""The paper's theorems: the bound of theorem 3 for a trained run, and theorems 1 and 2 against measured runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from sparsesam.analysis import (
    AnalysisResult,
    Convergence,
    GeneralizationBound,
    generalization_bound,
    measure_convergence,
    nonconvex_logistic,
)
from sparsesam.analysis.bound import CAVEATS
from sparsesam.lab.display import Axis, Cell, Figure, Series, SeriesStyle, error_bars, numbers, significant
from sparsesam.lab.experiment.run_directory import RunDirectory
from sparsesam.lab.experiment.setting_types import option
from sparsesam.lab.inspection.analysis import Analysis, Measured, Progress, Summary
from sparsesam.lab.inspection.trained_run import EvalSettings, TrainedRun
from sparsesam.lab.inspection.within_rho import every_and_masked

_SATISFIED = Cell("all satisfied", status="finished")


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
    help = "the bound of theorem 3 term by term, for all weights and for those of the mask"
    title = "Generalization bound"
    caption = "Test loss ≤ largest loss within rho + complexity. Vacuous if not below the loss of a uniform prediction."
    files = ("bound",)

    rho: float | None = option(None, "radius; default the first run's")
    delta: float = option(0.05, "the bound holds with probability 1 - delta")
    steps: int = option(20, "gradient ascent steps to find the largest loss")

    def measure(self, subject: TrainedRun, progress: Progress) -> BoundResult:
        if subject.on.split != "train":
            raise ValueError(
                f"split must be train for the bound, which depends on the training loss, got {subject.on.split}"
            )
        n, classes = subject.batches.count, subject.splits.num_classes
        measure = partial(generalization_bound, subject.objective, n=n, classes=classes, **self.options)
        return BoundResult(*every_and_masked(subject, progress, measure))

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
            "remainder": every.remainder,
            "k": every.k,
            "n": every.n,
            "delta": every.delta,
            "rho": every.rho,
            "||w||²": every.squared_norm,
        }

    @classmethod
    def figures(cls, name: str, measured: Sequence[Measured[BoundResult]]) -> list[Figure]:
        caption = "complexity = sqrt((dimension + confidence + remainder) / (n − 1))."
        x, y = Axis("term"), Axis("value", log=True)
        panels = {"": [_terms(one, bound) for one in measured for bound in one.result.bounds]}
        return [Figure("bound-terms", "Terms of the complexity", caption, x, y, panels, kind="bars")]

    @classmethod
    def notes(cls, measured: Sequence[Measured[BoundResult]]) -> list[str]:
        """Returns the notes that apply to every bound; those on a run's own numbers are in its file."""
        return list(CAVEATS)

    @classmethod
    def all_vacuous(cls, measured: Sequence[Measured[BoundResult]]) -> str:
        """Returns one sentence to replace the section if all bounds are vacuous, else an empty string."""
        bounds = [bound for one in measured for bound in one.result.bounds]
        if not bounds or not all(bound.vacuous for bound in bounds):
            return ""
        least = min(bounds, key=lambda bound: bound.bound)
        return (
            f"Generalization bound (theorem 3): vacuous for every run; the smallest is {significant(least.bound)}, "
            f"while a uniform prediction has a loss of {significant(least.threshold)}."
        )


def _terms(one: Measured[BoundResult], bound: GeneralizationBound) -> Series:
    terms = [bound.dimension_term, bound.confidence_term, bound.remainder]
    name = f"{one.label} (masked)" if bound.masked else ""
    return one.series(["dimension", "confidence", "remainder"], terms, name=name, faint=bound.masked)


@dataclass(frozen=True)
class ConvergenceResult(AnalysisResult):
    sam: Convergence
    ssam: Convergence

    @property
    def methods(self) -> list[Convergence]:
        return [self.sam, self.ssam]


@dataclass(frozen=True)
class ConvergenceAnalysis(Analysis[ConvergenceResult]):
    help = "theorems 1 and 2 compared with measured runs of a smooth problem; needs no trained run"
    title = "Convergence"
    caption = "1/T Σ ||∇f(w_t)||² at the last T, the theorem’s bound, and whether its assumptions hold."
    files = ("convergence",)
    uses_checkpoint = False
    argument = ("DIR", "directory for the result")

    steps: int = option(1000, "steps of each run")
    repeats: int = option(4, "number of runs to average over")
    sigma: float = option(0.5, "standard deviation of the gradient noise")
    sparsity: float = option(0.5, "share of weights that SSAM does not perturb")
    eta_0: float | None = option(None, "initial learning rate; default 1 / L")
    rho_0: float | None = option(None, "initial rho; default the largest that the theorem allows")
    seed: int = option(0, "seed of the problem, the noise and the mask")

    def load_subject(self, path: Path, on: EvalSettings) -> RunDirectory:
        """Returns the directory for the result, which needs no run."""
        return RunDirectory(path)

    def measure(self, subject: RunDirectory, progress: Progress) -> ConvergenceResult:
        options = {"problem": nonconvex_logistic(seed=self.seed), **self.options}
        options["runs"] = options.pop("repeats")
        sam = measure_convergence("SAM", **options)
        progress(1, 2)
        ssam = measure_convergence("SSAM", **options)
        progress(2, 2)
        return ConvergenceResult(sam, ssam)

    @classmethod
    def summary(cls, result: ConvergenceResult) -> Summary:
        return {f"{one.method}: {name}": cell for one in result.methods for name, cell in _row(one).items()}

    @classmethod
    def figures(cls, name: str, measured: Sequence[Measured[ConvergenceResult]]) -> list[Figure]:
        caption = (
            "1/T Σ ||∇f(w_t)||², mean and standard deviation over the runs, and the theorem’s bound: as printed, with "
            "log T, and with Σ 1/t in its place, which the proof needs."
        )
        x, y = Axis("T", log=True), Axis("mean squared gradient norm", log=True)
        panels = {
            one.method if len(measured) == 1 else f"{one.method}, {found.label}": _curves(one)
            for found in measured
            for one in found.result.methods
        }
        return [Figure("convergence", "Measured and bound", caption, x, y, panels)]


def _row(one: Convergence) -> Summary:
    failed = "; ".join(each.text for each in one.assumptions if not each.holds)
    return {
        "T": int(one.T[-1]),
        "mean ||∇f||²": one.measured[-1],
        "bound as printed": one.bound[-1],
        "bound with Σ 1/t": one.bound_harmonic[-1],
        "slope in log T": one.slope,
        "assumptions": Cell(
            f"not satisfied: {failed}" if failed else "all satisfied", status="failed" if failed else "finished"
        ),
    }


def _curves(one: Convergence) -> list[Series]:
    bars = error_bars(numbers(one.measured), numbers(one.deviation))
    # The printed bound can be 0 or less at T = 1, which a logarithmic axis cannot show.
    printed, harmonic = (np.where(curve > 0, curve, np.nan) for curve in (one.bound, one.bound_harmonic))
    return [
        SeriesStyle("blue").series(f"measured, {one.method}", one.T, one.measured, bars=bars),
        SeriesStyle("orange").series("bound, log T", one.T, printed),
        SeriesStyle("green").series("bound, Σ 1/t", one.T, harmonic),
    ]
