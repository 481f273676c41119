"""Runs that differ in nothing but their seed, together; what they came to, and what they cost beside plain steps."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sparsesam.lab.experiment.config import PLAIN
from sparsesam.lab.report.names import OPTIMIZERS, optimizer_name, setting_name
from sparsesam.lab.report.numbers import Number
from sparsesam.lab.report.read_run import Run

#: What is learned: accuracies are compared only where these agree.
TASK = ("dataset", "model", "train_size", "test_size", "label_noise", "corruption", "corruption_rate")
#: What a plain step costs: times are compared only where these agree, and the machine.
_COST = ("dataset", "model", "train_size", "augment", "compile", "batch_size", "precision")
_MACHINE = ("cpu", "machine", "threads")


@dataclass(frozen=True)
class Variant:
    """``number`` tells variants of one optimizer and task apart, from 0. ``relative_time`` is in plain steps' time."""

    label: str
    task: str
    optimizer: str
    number: int
    runs: list[Run]
    relative_time: Number

    @property
    def settings(self) -> dict[str, Any]:
        return self.runs[0].settings

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.status == "finished"]

    @property
    def accuracy(self) -> Number:
        return self.mean("test_accuracy")

    def mean(self, measure: str) -> Number:
        values = self.values(measure)
        return statistics.fmean(values) if values else None

    def spread(self, measure: str) -> Number:
        """The sample standard deviation; None for fewer than two runs."""
        values = self.values(measure)
        return statistics.stdev(values) if len(values) > 1 else None

    def median(self, measure: str) -> Number:
        values = self.values(measure)
        return statistics.median(values) if values else None

    def values(self, measure: str) -> list[float]:
        return [value for run in self.finished if (value := run.measured(measure)) is not None]

    def name_of(self, run: Run, among: Iterable[Run]) -> str:
        """The label, with what tells this run from others ``among`` those of the variant."""
        others = [one for one in among if one in self.runs and one is not run]
        if not others:
            return self.label
        seed = run.settings.get("seed")
        if any(one.settings.get("seed") == seed for one in others):
            return f"{self.label}, {run.path.name}"
        return f"{self.label}, seed {seed}"


def group(runs: Sequence[Run]) -> list[Variant]:
    """Every run whose settings are known, tasks together."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.settings:
            groups.setdefault(_key(run.settings, leave_out=("seed",)), []).append(run)
    tasks = sorted({_task_key(members[0]) for members in groups.values()}, key=_natural)
    varied_tasks = _varied([members[0].settings for members in groups.values()], TASK)
    plain_times = _plain_times(runs)
    variants = []
    for task in tasks:
        of_task = sorted((one for one in groups.values() if _task_key(one[0]) == task), key=_rank)
        counts: dict[str, int] = {}
        for members in of_task:
            settings = members[0].settings
            optimizer = str(settings["optimizer"])
            alike = [other[0].settings for other in of_task if other[0].settings["optimizer"] == optimizer]
            own = [name for name in settings if name not in (*TASK, "seed", "optimizer")]
            words = [setting_name(name, settings.get(name)) for name in _varied(alike, own)]
            variants.append(
                Variant(
                    label=", ".join([optimizer_name(optimizer), *words]),
                    task=_task_label(settings, varied_tasks),
                    optimizer=optimizer,
                    number=counts.setdefault(optimizer, 0),
                    runs=members,
                    relative_time=_relative_time(members, plain_times),
                )
            )
            counts[optimizer] += 1
    return variants


def by_task(variants: Sequence[Variant]) -> dict[str, list[Variant]]:
    tasks: dict[str, list[Variant]] = {}
    for variant in variants:
        tasks.setdefault(variant.task, []).append(variant)
    return tasks


def differing(variants: Sequence[Variant]) -> list[str]:
    """The settings that are not the same in all variants."""
    if not variants:
        return []
    names = dict.fromkeys(name for variant in variants for name in variant.settings if name != "seed")
    return _varied([variant.settings for variant in variants], list(names))


def _rank(members: Sequence[Run]) -> tuple[bool, int, list[str | float]]:
    """Plain steps first, then SAM, then SSAM; what nothing is finished of, last."""
    known, optimizer = list(OPTIMIZERS), members[0].settings["optimizer"]
    place = known.index(optimizer) if optimizer in known else len(known)
    return all(run.status != "finished" for run in members), place, _natural(_key(members[0].settings))


def _natural(text: str) -> list[str | float]:
    """Sorts numbers within text by their value."""
    return [float(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+\.?\d*)", text))]


def _varied(settings: Sequence[dict[str, Any]], names: Iterable[str]) -> list[str]:
    return [name for name in names if len({_key({name: one.get(name)}) for one in settings}) > 1]


def _task_key(run: Run) -> str:
    return _key({name: run.settings.get(name) for name in TASK})


def _task_label(settings: dict[str, Any], varied: Sequence[str]) -> str:
    words = [str(settings.get("dataset")), str(settings.get("model"))]
    return ", ".join(words + [setting_name(name, settings.get(name)) for name in varied if name not in TASK[:2]])


def _key(settings: dict[str, Any], leave_out: Sequence[str] = ()) -> str:
    kept = {name: value for name, value in settings.items() if name not in leave_out}
    return json.dumps(kept, sort_keys=True, default=str)


# ---- cost ------------------------------------------------------------------------------------------------------


def _cost_key(run: Run, base: Any) -> str:
    alike = {name: run.settings.get(name) for name in _COST}
    return _key({**alike, **{name: run.provenance.get(name) for name in _MACHINE}, "base": base})


def _plain_times(runs: Sequence[Run]) -> dict[str, float]:
    """Seconds per epoch of plain steps: a median, so that whatever else the machine did for a while does not count."""
    times: dict[str, list[float]] = {}
    for run in runs:
        seconds = run.measured("seconds_per_epoch")
        if seconds and run.settings.get("optimizer") in PLAIN:
            times.setdefault(_cost_key(run, run.settings["optimizer"]), []).append(seconds)
    return {key: statistics.median(values) for key, values in times.items()}


def _relative_time(members: Sequence[Run], plain_times: dict[str, float]) -> Number:
    ratios = []
    for run in members:
        optimizer, base = run.settings["optimizer"], run.settings["base"]
        plain = plain_times.get(_cost_key(run, optimizer if optimizer in PLAIN else base))
        seconds = run.measured("seconds_per_epoch")
        if plain and seconds:
            ratios.append(seconds / plain)
    return statistics.median(ratios) if ratios else None
