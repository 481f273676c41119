"""The data of a report: all runs, their tasks, the cost of each variant, and the recommended variant."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from sparsesam.lab.display import Number, plural, ratio
from sparsesam.lab.display.figure import OPTIMIZERS
from sparsesam.lab.experiment.calibration import SweepCalibration, read_calibration
from sparsesam.lab.experiment.confidence import differ
from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.report.read_run import RunRecord, find_runs
from sparsesam.lab.report.variants import Variant, group_variants, task_label, unique


class ReportData:
    """``directories`` also has those with analyses only, which belong to no task. ``calibrations`` are the times that
    sweeps measured. ``problems`` are (directory, message) pairs for unreadable files; sections add to them.
    """

    def __init__(self, places: Iterable[str | os.PathLike[str]]) -> None:
        self.directories = [RunRecord(path) for path in find_runs(places)]
        self.runs = [run for run in self.directories if run.status != "analyses only"]
        self.problems = [(str(run.path), one) for run in self.directories for one in run.problems]
        self.calibrations: list[SweepCalibration] = []
        for folder in dict.fromkeys(run.path.resolve().parent for run in self.directories):
            try:
                calibration = read_calibration(folder)
            except (OSError, ValueError) as error:
                self.problems.append((str(folder), str(error)))
                continue
            self.calibrations += [calibration] if calibration else []
        self.tasks = self._tasks()

    def _tasks(self) -> list[Task]:
        """Group every run with known settings by task and variant."""
        found: dict[str, dict[TrainConfig, list[RunRecord]]] = {}
        for run in self.runs:
            if run.config is not None:
                variants = found.setdefault(task_label(run.config), {})
                variants.setdefault(replace(run.config, seed=0), []).append(run)
        labels = sorted(found)
        names = unique([re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.")[:60] or "task" for label in labels], "-")
        return [
            Task(name, label, group_variants(found[label]), self.calibrations)
            for name, label in zip(names, labels, strict=True)
        ]

    def count(self) -> str:
        statuses = [run.status for run in self.runs]
        known = [one for one in ("finished", "failed", "unfinished") if one in statuses]
        counts = ", ".join(f"{statuses.count(one)} {one}" for one in known)
        return f"{plural(len(statuses), 'run')}: {counts}" if statuses else "no runs, analyses only"


@dataclass(frozen=True)
class Task:
    """Variants whose accuracies can be compared; ``name`` is used in links and file names."""

    name: str
    label: str
    variants: list[Variant]
    calibrations: Sequence[SweepCalibration] = ()

    @property
    def runs(self) -> list[RunRecord]:
        return [run for variant in self.variants for run in variant.runs]

    def variant_of(self, run: RunRecord) -> Variant:
        return next(variant for variant in self.variants if run in variant.runs)

    @cached_property
    def cost(self) -> VariantCosts:
        """Times if one calibration measured all finished variants; otherwise forward-backward passes."""
        finished = [variant for variant in self.variants if variant.finished]
        plain = next((variant for variant in finished if variant.config.is_plain), None)
        name = OPTIMIZERS[plain.config.optimizer][0] if plain is not None else "a plain step"
        for calibration in self.calibrations:
            if plain is not None and all(calibration.of(variant.config) for variant in finished):
                seconds = {variant: calibration.seconds_per_epoch(variant.config) for variant in self.variants}
                cpu = calibration.provenance.get("cpu")
                where = f" on {cpu}." if cpu else "."
                explanation = "Cost is time, including masks: all variants were measured together, interleaved" + where
                return VariantCosts("time", name, explanation, _relative(seconds, plain))
        explanation = (
            "Cost is counted in forward-backward passes, including masks, not in time: these runs were not measured "
            "together."
        )
        counted = {variant: variant.by_seed("forward_backwards_per_step").values() for variant in self.variants}
        passes = {variant: statistics.median(values) if values else None for variant, values in counted.items()}
        return VariantCosts("passes", name, explanation, _relative(passes, plain))

    @property
    def recommendation(self) -> Recommendation | None:
        """The cheapest variant whose accuracy does not differ significantly from the highest mean.

        Of equally cheap ones, the most accurate. A difference is significant if its 95 % interval, seed by seed,
        excludes 0. None for fewer than two variants with an accuracy and a cost.
        """
        costs = self.cost.values
        known = [variant for variant in self.variants if variant.accuracy is not None and costs[variant] is not None]
        if len(known) < 2:
            return None
        best = max(known, key=lambda variant: variant.accuracy or 0.0)
        equal = [variant for variant in known if variant is best or _is_not_different(variant, best)]
        chosen = min(equal, key=lambda variant: (costs[variant], -(variant.accuracy or 0.0)))
        sentence = f"Best choice: {chosen.label}, {chosen.accuracy_text} at {self.cost.show(chosen)}. "
        if chosen is best:
            return Recommendation(chosen, best, sentence + "It has the highest mean accuracy.")
        highest = f"The highest mean is {best.accuracy_text}, {best.label} at {self.cost.show(best)}; "
        return Recommendation(chosen, best, sentence + highest + "the difference is not significant.")


@dataclass(frozen=True)
class VariantCosts:
    """``values`` by variant, in units of ``reference``; ``explanation`` says how they were measured."""

    measure: Literal["time", "passes"]
    reference: str
    explanation: str
    values: Mapping[Variant, Number]

    @property
    def axis(self) -> str:
        words = {"time": "time of a run", "passes": "forward-backward passes"}
        return f"{words[self.measure]} / {self.reference}’s"

    def show(self, variant: Variant) -> str:
        return f"{ratio(self.values[variant])} × {self.reference}’s {self.measure}"


@dataclass(frozen=True)
class Recommendation:
    """``best`` has the highest mean accuracy; ``chosen`` is the cheapest without a significant difference."""

    chosen: Variant
    best: Variant
    sentence: str


def _relative(costs: Mapping[Variant, Number], plain: Variant | None) -> dict[Variant, Number]:
    """Convert costs per epoch or step to costs of whole runs, in units of the plain variant's."""
    if plain is None:
        return dict(costs)
    whole = {variant: cost and cost * variant.config.epochs for variant, cost in costs.items()}
    unit = whole[plain]
    return {variant: cost / unit if cost and unit else None for variant, cost in whole.items()}


def _is_not_different(first: Variant, second: Variant) -> bool:
    """Whether the difference is not significant; with fewer than three common seeds, whether the means are equal."""
    ours, theirs = first.by_seed("test_accuracy"), second.by_seed("test_accuracy")
    return not differ(ours, theirs) if len(ours.keys() & theirs.keys()) > 2 else first.accuracy == second.accuracy
