"""Variants (runs that differ only in their seed) and their labels."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsesam.lab.display import Number, SeriesStyle, assign_styles, number, percent
from sparsesam.lab.display.figure import OPTIMIZERS
from sparsesam.lab.experiment.confidence import half_width
from sparsesam.lab.experiment.config import DEFAULTS, TrainConfig
from sparsesam.lab.report.read_run import RunRecord

#: Settings that define a task, besides data set and model: accuracies are compared only if these agree.
TASK = ("train_size", "val_size", "test_size", "image_size", "label_noise", "corruption", "corruption_rate")
#: Runs are ranked only if these agree too.
LENGTH = ("epochs", "max_steps")


@dataclass(frozen=True, eq=False)
class Variant:
    """``runs`` have distinct seeds; ``duplicates`` are further runs with the same settings and seed, not counted.

    ``config`` has seed 0. ``style`` is the same in every figure of the task.
    """

    label: str
    config: TrainConfig
    runs: list[RunRecord]
    duplicates: list[RunRecord]
    style: SeriesStyle

    @property
    def finished(self) -> list[RunRecord]:
        return [run for run in self.runs if run.status == "finished"]

    @property
    def accuracy(self) -> Number:
        return self.mean("test_accuracy")

    @property
    def accuracies(self) -> dict[int, float]:
        return self.by_seed("test_accuracy")

    @property
    def accuracy_text(self) -> str:
        return percent(self.accuracy, half_width(list(self.accuracies.values())))

    @property
    def length(self) -> tuple[Any, ...]:
        return tuple(getattr(self.config, name) for name in LENGTH)

    def mean(self, measure: str) -> Number:
        values = self.by_seed(measure).values()
        return statistics.fmean(values) if values else None

    def by_seed(self, measure: str) -> dict[int, float]:
        known = {run.seed: run.measured(measure) for run in self.finished}
        return {seed: value for seed, value in known.items() if seed is not None and value is not None}

    def label_of(self, run: RunRecord, among: Iterable[RunRecord]) -> str:
        """Returns the variant's label, with the seed if several of its runs are ``among`` those shown."""
        others = [other for other in among if other in self.runs and other is not run]
        return f"{self.label}, seed {run.seed}" if others else self.label


def group_variants(groups: Mapping[TrainConfig, list[RunRecord]], places: Mapping[str, int]) -> list[Variant]:
    """Returns the variants with unique labels and styles; configs of ``groups`` have seed 0.

    The order is that of ``places``, by ``content_hash``: the sweep's. Others follow: plain steps, SAM, SSAM; defaults
    before other settings.
    """

    def order(config: TrainConfig) -> tuple[Any, ...]:
        changed = changed_settings(config)
        values = [(name, number(value) or 0.0, str(value)) for name, value in changed.items()]
        return places.get(config.content_hash, len(places)), _method(config)[0], len(changed), values

    ordered = sorted(groups, key=order)
    labels = unique([_given_name(groups[config]) or _label(config, ordered) for config in ordered], ", ")
    styles = assign_styles([config.optimizer for config in ordered])
    return [
        Variant(label, config, *_one_per_seed(groups[config]), style)
        for label, config, style in zip(labels, ordered, styles, strict=True)
    ]


def unique(names: Sequence[str], separator: str) -> list[str]:
    """Number repeated names; two sweeps may use the same name."""
    counts = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name}{separator}{count + 1}" if count else name for name, count in zip(names, counts, strict=True)]


def _given_name(runs: Sequence[RunRecord]) -> str:
    """Returns the name given by a sweep or --name; empty if there is none or more than one."""
    names = {run.name for run in runs} - {""}
    return names.pop() if len(names) == 1 else ""


def _label(config: TrainConfig, others: Sequence[TrainConfig]) -> str:
    """Returns the optimizer with its length, if others differ in it, and every non-default setting that is not shared
    by its other variants.
    """
    lengths = [name for name in differing_settings(others) if name in LENGTH]
    differing = differing_settings([other for other in others if other.optimizer == config.optimizer])
    named = {name: getattr(config, name) for name in lengths if getattr(config, name) is not None}
    named |= {name: value for name, value in changed_settings(config).items() if name in differing}
    return ", ".join([_method(config)[1], *(setting_name(name, value) for name, value in named.items())])


def _method(config: TrainConfig) -> tuple[int, str]:
    """Returns the optimizer's place in the order of the report, and its name."""
    return list(OPTIMIZERS).index(config.optimizer), OPTIMIZERS[config.optimizer][0]


def task_label(config: TrainConfig) -> str:
    changed = changed_settings(config)
    others = [setting_name(name, changed[name]) for name in TASK if name in changed]
    return ", ".join([config.dataset, config.model, *others])


def _one_per_seed(members: Sequence[RunRecord]) -> tuple[list[RunRecord], list[RunRecord]]:
    """Returns one run per seed, preferably finished, then with the most analyses; and the other runs."""
    counted: dict[int | None, RunRecord] = {}
    for run in sorted(members, key=lambda run: (run.status != "finished", -len(run.analyses))):
        counted.setdefault(run.seed, run)
    chosen = [run for run in members if run in counted.values()]
    return chosen, [run for run in members if run not in chosen]


def differing_settings(configs: Sequence[TrainConfig]) -> list[str]:
    """Returns the settings that are not the same in all configs."""
    return [name for name in DEFAULTS if name != "seed" and len({getattr(config, name) for config in configs}) > 1]


def changed_settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings that are not at their defaults."""
    settings = {name: getattr(config, name) for name in DEFAULTS if name != "seed"}
    return {name: value for name, value in settings.items() if value != DEFAULTS[name]}


def setting_name(name: str, value: Any) -> str:
    return f"{name.replace('_', ' ')} {show_setting(value)}"


def show_setting(value: Any) -> str:
    """Format a setting's value briefly."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(show_setting, value))
    return "none" if value is None else str(value)
