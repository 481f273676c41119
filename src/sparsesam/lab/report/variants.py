"""Tasks, and in each task the variants: runs that differ in nothing but their seed."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sparsesam.lab.display.colors import assign_colors
from sparsesam.lab.display.numbers import Number
from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.report.names import OPTIMIZERS, optimizer_name, setting_name
from sparsesam.lab.report.read_run import RunRecord

#: What is learned: accuracies are compared only where these agree.
TASK = ("dataset", "model", "train_size", "test_size", "label_noise", "corruption", "corruption_rate")
#: Of all settings.
DEFAULTS = {one.name: one.default for one in dataclasses.fields(TrainConfig)}


@dataclass(frozen=True, eq=False)
class Variant:
    """``runs`` have one seed each; ``duplicates`` are further runs of the same settings and seed, which do not count.

    ``color`` and ``number`` are its look in every figure of its task.
    """

    label: str
    settings: dict[str, Any]
    runs: list[RunRecord]
    color: str = "blue"
    number: int = 0
    duplicates: list[RunRecord] = field(default_factory=list)

    @property
    def optimizer(self) -> str:
        return str(self.settings["optimizer"])

    @property
    def config(self) -> TrainConfig | None:
        return self.runs[0].config

    @property
    def hashes(self) -> set[str]:
        """Of its settings with seed 0; a run of another version of sparsesam may have another one."""
        return {run.variant_hash for run in (*self.runs, *self.duplicates)}

    @property
    def finished(self) -> list[RunRecord]:
        return [run for run in self.runs if run.status == "finished"]

    @property
    def accuracy(self) -> Number:
        return self.mean("test_accuracy")

    def mean(self, measure: str) -> Number:
        values = self.values(measure)
        return statistics.fmean(values) if values else None

    def deviation(self, measure: str) -> Number:
        """The sample standard deviation over seeds; None for fewer than two runs."""
        values = self.values(measure)
        return statistics.stdev(values) if len(values) > 1 else None

    def values(self, measure: str) -> list[float]:
        return [value for run in self.finished if (value := run.measured(measure)) is not None]

    def label_of(self, run: RunRecord, among: Iterable[RunRecord]) -> str:
        """The variant's label, with the seed if several of its runs are ``among`` those shown."""
        others = [one for one in among if one in self.runs and one is not run]
        return f"{self.label}, seed {run.settings.get('seed')}" if others else self.label


@dataclass(frozen=True)
class Task:
    """``name`` is for links and file names."""

    name: str
    label: str
    variants: list[Variant]

    @property
    def runs(self) -> list[RunRecord]:
        return [run for variant in self.variants for run in variant.runs]

    def variant_of(self, run: RunRecord) -> Variant:
        return next(variant for variant in self.variants if run in variant.runs)


def group_runs(runs: Sequence[RunRecord], names: Mapping[str, str] = MappingProxyType({})) -> list[Task]:
    """Every run whose settings are known. ``names`` are those that sweeps gave to variants, by their hash."""
    tasks: dict[str, dict[str, list[RunRecord]]] = {}
    for run in runs:
        if run.settings:
            variants = tasks.setdefault(_key({name: run.settings.get(name) for name in TASK}), {})
            variants.setdefault(_key(run.settings, leave_out=("seed",)), []).append(run)
    ordered = [tasks[key] for key in sorted(tasks, key=_natural)]
    task_names = _unique_names([_task_label(next(iter(variants.values()))[0].settings) for variants in ordered])
    return [
        Task(name, _task_label(next(iter(variants.values()))[0].settings), _variants(list(variants.values()), names))
        for name, variants in zip(task_names, ordered, strict=True)
    ]


def differing_settings(variants: Sequence[Variant]) -> list[str]:
    """The settings that are not the same in all variants."""
    names = dict.fromkeys(name for variant in variants for name in variant.settings if name != "seed")
    return _varied([variant.settings for variant in variants], names)


def _variants(groups: Sequence[list[RunRecord]], names: Mapping[str, str]) -> list[Variant]:
    ordered = sorted(groups, key=_rank)
    looks = assign_colors([str(members[0].settings["optimizer"]) for members in ordered])
    variants = []
    for members, (color, number) in zip(ordered, looks, strict=True):
        settings = members[0].settings
        alike = [one[0].settings for one in ordered if one[0].settings["optimizer"] == settings["optimizer"]]
        counted, duplicates = _one_per_seed(members)
        variants.append(Variant(_label(members, alike, names), settings, counted, color, number, duplicates))
    labels = _unique_labels([variant.label for variant in variants])
    return [dataclasses.replace(variant, label=label) for variant, label in zip(variants, labels, strict=True)]


def _label(members: Sequence[RunRecord], alike: Sequence[dict[str, Any]], names: Mapping[str, str]) -> str:
    """The name that a sweep gave, or the optimizer with every setting that is not the default and not shared."""
    given = {run.variant_name for run in members} - {""}
    if len(given) == 1:
        return given.pop()
    known = [names[run.variant_hash] for run in members if run.variant_hash in names]
    if not given and known:
        return known[0]
    settings = members[0].settings
    own = [name for name in settings if name not in (*TASK, "seed", "optimizer")]
    words = [setting_name(name, settings[name]) for name in _varied(alike, own) if settings[name] != DEFAULTS.get(name)]
    return ", ".join([optimizer_name(str(settings["optimizer"])), *words])


def _one_per_seed(members: Sequence[RunRecord]) -> tuple[list[RunRecord], list[RunRecord]]:
    """Of the runs of a seed a finished one, and the one with the most analyses."""
    counted: dict[Any, RunRecord] = {}
    for run in sorted(members, key=lambda run: (run.status != "finished", -len(run.analyses))):
        counted.setdefault(run.settings.get("seed"), run)
    chosen = [run for run in members if run in counted.values()]
    return chosen, [run for run in members if run not in chosen]


def _unique_labels(labels: Sequence[str]) -> list[str]:
    """Two sweeps may give one name to different settings."""
    counts: dict[str, int] = {}
    unique = []
    for label in labels:
        counts[label] = counts.get(label, 0) + 1
        unique.append(label if counts[label] == 1 else f"{label} ({counts[label]})")
    return unique


def _unique_names(labels: Sequence[str]) -> list[str]:
    words = [re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.")[:60] or "task" for label in labels]
    return [f"{word}-{place + 1}" if words.count(word) > 1 else word for place, word in enumerate(words)]


def _rank(members: Sequence[RunRecord]) -> tuple[bool, int, int, list[str | float]]:
    """Plain steps first, then SAM, then SSAM; defaults before other settings; without a finished run last."""
    settings, known = members[0].settings, list(OPTIMIZERS)
    place = known.index(settings["optimizer"]) if settings["optimizer"] in known else len(known)
    changed = sum(settings[name] != DEFAULTS.get(name) for name in settings if name != "seed")
    return all(run.status != "finished" for run in members), place, changed, _natural(_key(settings))


def _natural(text: str) -> list[str | float]:
    """Sorts numbers within text by their value."""
    return [float(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+\.?\d*)", text))]


def _varied(settings: Sequence[dict[str, Any]], names: Iterable[str]) -> list[str]:
    return [name for name in names if len({_key({name: one.get(name)}) for one in settings}) > 1]


def _task_label(settings: dict[str, Any]) -> str:
    words = [str(settings.get("dataset")), str(settings.get("model"))]
    others = [name for name in TASK[2:] if settings.get(name) != DEFAULTS.get(name)]
    return ", ".join(words + [setting_name(name, settings.get(name)) for name in others])


def _key(settings: dict[str, Any], leave_out: Sequence[str] = ()) -> str:
    kept = {name: value for name, value in settings.items() if name not in leave_out}
    return json.dumps(kept, sort_keys=True, default=str)
