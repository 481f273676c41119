"""The data of a report: all runs, their tasks, the cost of each variant, and the recommended variant."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

from sparsesam.lab.display import Number, plural, ratio
from sparsesam.lab.experiment.calibration import SweepCalibration, read_calibration
from sparsesam.lab.experiment.confidence import MIN_SEEDS, rank
from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.report.read_run import RunRecord, find_runs
from sparsesam.lab.report.variants import LENGTH, Variant, group_variants, setting_name, task_label, unique

FileT = TypeVar("FileT")


class ReportData:
    """``directories`` also has those with analyses only, which belong to no task. ``calibrations`` are the times that
    sweeps measured. ``problems`` are (directory, message) pairs for unreadable files; sections add to them.
    """

    def __init__(self, places: Iterable[str | os.PathLike[str]]) -> None:
        self.directories = [RunRecord(path) for path in find_runs(places)]
        self.runs = [run for run in self.directories if run.status != "analyses only"]
        self.problems = [(str(run.path), text) for run in self.directories for text in run.problems]
        self.calibrations = self._beside_runs(read_calibration)
        self.sweeps = self._beside_runs(read_sweep_file)
        self.tasks = self._tasks()

    @property
    def title(self) -> str:
        """The title of the sweep; "sparsesam report" for none or several."""
        return self.sweeps[0][0] if len(self.sweeps) == 1 else "sparsesam report"

    def _beside_runs(self, read: Callable[[Path], FileT | None]) -> list[FileT]:
        """Read a file of each directory that contains runs; unreadable ones are noted as problems."""
        found = []
        for folder in dict.fromkeys(run.path.resolve().parent for run in self.directories):
            try:
                content = read(folder)
            except (OSError, ValueError) as error:
                self.problems.append((str(folder), str(error)))
            else:
                found += [] if content is None else [content]
        return found

    def _tasks(self) -> list[Task]:
        """Group every run with known settings by task and variant."""
        found: dict[str, dict[TrainConfig, list[RunRecord]]] = {}
        for run in self.runs:
            if run.config is not None:
                variants = found.setdefault(task_label(run.config), {})
                variants.setdefault(run.config.variant, []).append(run)
        order = {key: place for place, key in enumerate(key for _, keys in self.sweeps for key in keys)}
        labels = sorted(found)
        names = unique([re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.")[:60] or "task" for label in labels], "-")
        return [
            Task(name, label, group_variants(found[label], order), self.calibrations)
            for name, label in zip(names, labels, strict=True)
        ]

    def count(self) -> str:
        statuses = [run.status for run in self.runs]
        known = [status for status in ("finished", "failed", "unfinished") if status in statuses]
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in known)
        return f"{plural(len(statuses), 'run')}: {counts}" if statuses else "no runs, analyses only"


def read_sweep_file(folder: Path) -> tuple[str, list[str]] | None:
    """Returns a sweep's title and the ``content_hash`` of its variants in order; None without ``sweep.json``."""
    try:
        content = json.loads((folder / "sweep.json").read_text())
        return str(content["title"]), list(content["variants"].values())
    except FileNotFoundError:
        return None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"sweep.json is not of this version of sparsesam ({error}); delete it") from error


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
        name = plain.label if plain is not None else "a plain step"
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

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Returns a verdict for each length that several variants have, or one that says why nothing is ranked."""
        lengths: dict[tuple[object, ...], list[Variant]] = {}
        for variant in self.variants:
            if variant.accuracy is not None:
                lengths.setdefault(variant.length, []).append(variant)
        found = [self._verdict(group, len(lengths) > 1) for group in lengths.values() if len(group) > 1]
        if len(lengths) > 1 and not found:
            return [Verdict("No ranking: every variant has another length, which is not compared.", None)]
        return found

    def _verdict(self, variants: list[Variant], name_length: bool) -> Verdict:
        """The cheapest variant whose accuracy does not differ significantly from the highest mean; of equally cheap
        ones, the most accurate.
        """
        length = [(name, value) for name, value in zip(LENGTH, variants[0].length, strict=True) if value is not None]
        start = f"{', '.join(setting_name(*setting) for setting in length)}. ".capitalize() if name_length else ""
        ranking = rank({variant: variant.accuracies for variant in variants})
        if ranking is None:
            reason = "it takes two variants with at least three finished seeds; with fewer, a difference may be chance"
            return Verdict(f"{start}No ranking: {reason}.", None)
        cost, best = self.cost, ranking.best
        chosen = min(ranking.alike, key=lambda variant: (cost.values[variant] or math.inf, -(variant.accuracy or 0.0)))
        sentence = f"{start}Best choice: {chosen.label}, {chosen.accuracy_text} at {cost.show(chosen)}. "
        if chosen is best:
            sentence += "It has the highest mean accuracy."
        else:
            highest = f"The highest mean is {best.accuracy_text}, {best.label} at {cost.show(best)}"
            sentence += f"{highest}; the difference is not significant."
        few = ", ".join(variant.label for variant in variants if len(variant.accuracies) < MIN_SEEDS)
        return Verdict(f"{sentence} Not ranked, fewer than three seeds: {few}." if few else sentence, chosen)


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
class Verdict:
    """``chosen`` is None if the ``sentence`` says why there is no ranking."""

    sentence: str
    chosen: Variant | None


def _relative(costs: Mapping[Variant, Number], plain: Variant | None) -> dict[Variant, Number]:
    """Convert costs per epoch or step to costs of whole runs, in units of the plain variant's."""
    if plain is None:
        return dict(costs)
    whole = {
        variant: cost and cost * (variant.mean("epochs") or variant.config.epochs) for variant, cost in costs.items()
    }
    unit = whole[plain]
    return {variant: cost / unit if cost and unit else None for variant, cost in whole.items()}
