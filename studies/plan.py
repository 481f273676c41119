"""The plan of a study: its tasks and methods from YAML, and their runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from sparsesam.lab.experiment.config import TrainConfig, from_mapping
from sparsesam.lab.experiment.cost import passes_per_step

HERE = Path(__file__).parent
Record = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One run. ``stage`` is "tune", judged on validation images, or "final", judged on test images."""

    task: str
    method: str
    stage: str
    settings: Mapping[str, Any]
    flatness: bool = False
    part: str | None = None  # a name in `parts.py`; `part_passes` are the passes it adds to each step
    part_passes: float = 0.0

    @property
    def config(self) -> TrainConfig:
        return from_mapping(TrainConfig, self.settings)


@dataclass(frozen=True)
class Task:
    name: str
    content: Mapping[str, Any]
    methods: Mapping[str, Mapping[str, Any]]

    @property
    def core(self) -> list[str]:
        return list(self.content["methods"])

    @property
    def names(self) -> list[str]:
        return [*self.core, *self.content.get("then", [])]

    def axis(self, method: str) -> tuple[str, list[float]]:
        """Returns the setting that a method tunes, and its values."""
        ((name, values),) = self.methods[method]["tune"].items()
        return name, self.content.get("tune", {}).get(method, values)

    def tuning(self, method: str) -> list[Job]:
        name, values = self.axis(method)
        return [
            self.job(method, "tune", {name: value, "seed": seed})
            for value in values
            for seed in self.content["tune_seeds"]
        ]

    def finals(self, method: str, records: Iterable[Record]) -> list[Job]:
        """Returns the runs with the best strength on validation images; none before all tuning is done."""
        best = self.best(method, records)
        if best is None:
            return []
        name, _ = self.axis(method)
        return [self.job(method, "final", {name: best, "seed": seed}) for seed in range(self.content["seeds"])]

    def best(self, method: str, records: Iterable[Record]) -> float | None:
        """Returns the value with the highest mean accuracy over the tuning seeds; the first of equals."""
        found = self.tuned(method, records)
        return max(found, key=lambda value: found[value]) if found is not None else None

    def tuned(self, method: str, records: Iterable[Record]) -> dict[float, float] | None:
        """Returns the validation accuracy by value; None while a run is missing."""
        name, values = self.axis(method)
        mine = [r for r in records if (r["task"], r["method"], r["stage"]) == (self.name, method, "tune")]
        found = {}
        for value in values:
            seeds = {r["settings"]["seed"]: r["accuracy"] for r in mine if r["settings"][name] == value}
            if not set(self.content["tune_seeds"]) <= seeds.keys():
                return None
            found[value] = fmean(seeds[seed] for seed in self.content["tune_seeds"])
        return found

    def job(self, method: str, stage: str, own: Mapping[str, Any]) -> Job:
        rule, common = self.methods[method], dict(self.content["settings"])
        common["dataset"] = self.content["data"] + ("_validation" if stage == "tune" else "_test")
        settings = {**common, **rule["settings"], **own}
        base = self.content.get("base", "sgd")
        if settings["optimizer"] == "sgd":
            settings["optimizer"] = base
        else:
            settings["base"] = base
        settings["epochs"] *= rule.get("epochs", 1)
        if "start" in rule:
            settings["ascent_start"] = rule["start"] * settings["epochs"]
        wanted = self.content.get("flatness", {"methods": [], "seeds": 0})
        flatness = stage == "final" and method in wanted["methods"] and own["seed"] < wanted["seeds"]
        return Job(self.name, method, stage, settings, flatness, rule.get("part"), rule.get("part_passes", 0.0))


def read_task(name: str) -> Task:
    methods = yaml.safe_load((HERE / "methods.yaml").read_text())
    content = yaml.safe_load((HERE / "tasks" / f"{name}.yaml").read_text())
    return Task(name, content, methods)


def task_names() -> list[str]:
    return sorted(path.stem for path in (HERE / "tasks").glob("*.yaml"))


def passes_with_fisher(config: TrainConfig, images: int) -> float:
    """Returns forward-backward passes over a batch per step, including those of the Fisher information."""
    fisher = 0.0
    if config.optimizer == "ssam-f" and config.mask_epochs is not None:
        fisher = config.fisher_samples * -(-config.epochs // config.mask_epochs) / (images * config.epochs)
    return passes_per_step(config) + fisher
