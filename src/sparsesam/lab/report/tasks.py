"""The data of a report: all runs, grouped by task and variant, and the recommended variant of each task."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsesam.lab.display import assign_styles, plural
from sparsesam.lab.display.figure import OPTIMIZERS
from sparsesam.lab.experiment.calibration import SweepCalibration, read_calibration
from sparsesam.lab.experiment.config import DEFAULTS, TrainConfig
from sparsesam.lab.experiment.errors import RunError
from sparsesam.lab.experiment.run_directory import read_json
from sparsesam.lab.experiment.variants import MIN_SEEDS, Costs, Variant, costs_of, grouped, rank
from sparsesam.lab.report.read_run import RunRecord, find_runs

RunVariant = Variant[RunRecord]
#: Settings that define a task, besides data set and model: accuracies are compared only if these agree.
TASK = ("train_size", "val_size", "test_size", "image_size", "label_noise", "corruption", "corruption_rate")


class ReportData:
    """``directories`` also has those with analyses only, which belong to no task. ``calibrations`` are the times that
    sweeps measured, ``sweeps`` their titles and variants. ``problems`` are (directory, message) pairs for unreadable
    files; sections add to them.
    """

    def __init__(self, places: Iterable[str | os.PathLike[str]]) -> None:
        self.directories = [RunRecord(path) for path in find_runs(places)]
        self.runs = [run for run in self.directories if run.status != "analyses only"]
        self.problems = [(str(run.path), text) for run in self.directories for text in run.problems]
        self.calibrations: list[SweepCalibration] = []
        self.sweeps: list[tuple[str, list[str]]] = []
        for folder in dict.fromkeys(run.path.resolve().parent for run in self.directories):
            for read, found in ((read_calibration, self.calibrations), (read_sweep_file, self.sweeps)):
                try:
                    content: Any = read(folder)
                except (OSError, ValueError) as error:
                    self.problems.append((str(folder), str(error)))
                else:
                    found += [] if content is None else [content]
        known = [(run.config, run) for run in self.runs if run.config is not None]
        order = {key: place for place, key in enumerate(key for _, keys in self.sweeps for key in keys)}
        by_task = sorted(grouped(known, lambda pair: task_label(pair[0])).items())
        self.tasks: list[Task] = []
        for count, (label, pairs) in enumerate(by_task, start=1):
            variants = group_variants(pairs, order)
            self.tasks.append(Task(f"task-{count}", label, variants, costs_of(variants, self.calibrations)))

    @property
    def title(self) -> str:
        """The title of the sweep; "sparsesam report" for none or several."""
        return self.sweeps[0][0] if len(self.sweeps) == 1 else "sparsesam report"

    def count(self) -> str:
        statuses = [run.status for run in self.runs]
        known = [status for status in ("finished", "failed", "unfinished", "unreadable") if status in statuses]
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in known)
        return f"{plural(len(statuses), 'run')}: {counts}" if statuses else "no runs, analyses only"


def read_sweep_file(folder: Path) -> tuple[str, list[str]] | None:
    """Returns a sweep's title and the ``content_hash`` of its variants in order; None without ``sweep.json``."""
    try:
        content = read_json(folder / "sweep.json")
        return None if content is None else (str(content["title"]), list(content["variants"].values()))
    except (AttributeError, KeyError, TypeError, RunError) as error:
        raise ValueError(f"sweep.json is not of this version of sparsesam ({error}); delete it") from error


def group_variants(runs: Iterable[tuple[TrainConfig, RunRecord]], places: Mapping[str, int]) -> list[RunVariant]:
    """Returns the variants with unique labels and styles, and one run per seed, preferably finished and analyzed.

    The order is that of ``places``, by ``content_hash``: the sweep's. Others follow: plain steps, SAM, SSAM; defaults
    before other settings.
    """
    groups = grouped(runs, lambda pair: pair[0].variant)

    def order(config: TrainConfig) -> tuple[Any, ...]:
        place, changed = places.get(config.content_hash, len(places)), changed_settings(config)
        return place, list(OPTIMIZERS).index(config.optimizer), len(changed), str(changed)

    ordered, labels, variants = sorted(groups, key=order), list[str](), []
    for config, style in zip(ordered, assign_styles([config.optimizer for config in ordered]), strict=True):
        members = sorted((run for _, run in groups[config]), key=lambda run: (not run.result, -len(run.analyses)))
        names = {run.name for run in members} - {""}  # by a sweep or --name
        labels.append(names.pop() if len(names) == 1 else variant_label(config, ordered))
        count = labels.count(labels[-1])  # two sweeps may use the same name
        label = labels[-1] if count == 1 else f"{labels[-1]}, {count}"
        by_seed = grouped(members, lambda run: run.seed)
        variants.append(Variant(label, config, [same[0] for same in by_seed.values()], style))
    return variants


@dataclass(frozen=True)
class Task:
    """Variants whose accuracies can be compared; ``name`` is used in links and file names."""

    name: str
    label: str
    variants: list[RunVariant]
    costs: Costs

    @property
    def verdict(self) -> tuple[str, RunVariant | None]:
        """A sentence, and the cheapest variant whose accuracy does not differ significantly from the highest mean; of
        equally cheap ones, the most accurate. None without a ranking; for a single variant the sentence is empty.
        """
        variants = [variant for variant in self.variants if variant.accuracy is not None]
        if len(variants) < 2:
            return "", None
        ranking, costs = rank({variant: variant.accuracies for variant in variants}), self.costs
        if not ranking:
            reason = "it takes two variants with at least three finished seeds; with fewer, a difference may be chance"
            return f"No ranking: {reason}.", None
        best = ranking[0]
        chosen = min(ranking, key=lambda variant: (costs.values[variant] or math.inf, -(variant.accuracy or 0.0)))
        sentence = f"Best choice: {chosen.label}, {chosen.accuracy_text} at {costs.show(chosen)}. "
        if chosen is best:
            sentence += "It has the highest mean accuracy."
        else:
            highest = f"The highest mean is {best.accuracy_text}, {best.label} at {costs.show(best)}"
            sentence += f"{highest}; the difference is not significant."
        few = ", ".join(variant.label for variant in variants if len(variant.accuracies) < MIN_SEEDS)
        return f"{sentence} Not ranked, fewer than three seeds: {few}." if few else sentence, chosen


def task_label(config: TrainConfig) -> str:
    changed = changed_settings(config)
    return ", ".join([config.dataset, config.model, *(_named(name, changed[name]) for name in TASK if name in changed)])


def variant_label(config: TrainConfig, others: Sequence[TrainConfig]) -> str:
    """Returns the optimizer and every non-default setting that is not shared by its other variants."""
    differing = differing_settings([other for other in others if other.optimizer == config.optimizer])
    named = [_named(name, value) for name, value in changed_settings(config).items() if name in differing]
    return ", ".join([OPTIMIZERS[config.optimizer][0], *named])


def label_of(variant: RunVariant, run: RunRecord, shown: Sequence[RunRecord]) -> str:
    """Returns the variant's label, with the seed if several of its runs are shown."""
    return variant.label if len(shown) == 1 else f"{variant.label}, seed {run.seed}"


def differing_settings(configs: Sequence[TrainConfig]) -> list[str]:
    """Returns the settings that are not the same in all configs."""
    return [name for name in DEFAULTS if len({getattr(config, name) for config in configs}) > 1]


def changed_settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings that are not at their defaults."""
    return {name: value for name, default in DEFAULTS.items() if (value := getattr(config, name)) != default}


def show_setting(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return ", ".join(map(show_setting, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _named(name: str, value: Any) -> str:
    return f"{name.replace('_', ' ')} {show_setting(value)}"
