"""The paper's tables as recipes: their runs at two scales, and the paper's own numbers beside ours."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from sparsesam.lab.experiment.config import TrainConfig, from_mapping, nearest
from sparsesam.lab.experiment.sweep import Job, Sweep

Scale = Literal["laptop", "full"]
Finished = dict[TrainConfig, list[dict[str, Any]]]
_SECONDS = ("seconds_per_step", "seconds_per_epoch", "seconds_per_mask")


@dataclass(frozen=True)
class Column:
    label: str
    measure: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """Ours: mean, sample standard deviation (None for one seed) and number of seeds; None before any is finished."""

    mean: float
    spread: float | None
    seeds: int


@dataclass(frozen=True)
class Recipe:
    """A table: a config for each row and column, and the paper's numbers by row in the order of the full columns."""

    label: str
    title: str
    content: Mapping[str, Any]

    def columns(self, scale: Scale) -> list[Column]:
        shared = self.content[scale].get("settings", {})
        columns = []
        for label, own in self.content[scale]["columns"].items():
            settings = {**shared, **own}
            columns.append(Column(label, settings.pop("measure", "test_accuracy"), settings))
        return columns

    def rows(self, scale: Scale) -> list[str]:
        return list(self.content[scale].get("rows", self.content["rows"]))

    def paper(self, row: str) -> list[float]:
        return list(self.content["rows"][row]["paper"])

    def config(self, row: str, column: Column, overrides: Mapping[str, Any]) -> TrainConfig:
        values = {**column.settings, **self.content["rows"][row]["set"]}
        sgd_weight_decay = values.pop("sgd_weight_decay", None)
        if values.get("optimizer") == "sgd" and sgd_weight_decay is not None:
            values["weight_decay"] = sgd_weight_decay
        return from_mapping(TrainConfig, {**values, **overrides})

    def sweep(self, scale: Scale, seeds: Sequence[int], overrides: Mapping[str, Any]) -> Sweep:
        """All runs; columns that only measure something else of the same runs add none."""
        variants: dict[str, TrainConfig] = {}
        for row in self.rows(scale):
            for column in self.columns(scale):
                config = self.config(row, column, overrides)
                if config not in variants.values():
                    variants[f"{row}, {column.label}"] = config
        return Sweep(f"{self.title} ({scale})", variants, seeds)

    def cell(self, row: str, column: Column, finished: Finished, overrides: Mapping[str, Any]) -> Cell | None:
        results = finished.get(replace(self.config(row, column, overrides), seed=0), [])
        values = [result[column.measure] for result in results if result[column.measure] is not None]
        if not values:
            return None
        return Cell(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def finished_results(jobs: Sequence[Job]) -> Finished:
    """The results there are, by config with seed 0."""
    found: Finished = {}
    for job in jobs:
        if (result := job.result) is not None:
            found.setdefault(replace(job.config, seed=0), []).append(result)
    return found


def recipes() -> dict[str, Recipe]:
    content = yaml.safe_load((resources.files("sparsesam.lab.experiment") / "paper.yaml").read_text())
    return {label: Recipe(label, one["title"], one) for label, one in content["recipes"].items()}


def recipe(label: str) -> Recipe:
    known = recipes()
    if label not in known:
        raise ValueError(f"unknown table {label!r}; {nearest(label, known)} `sparsesam paper list` lists all")
    return known[label]


def default_out(label: str, scale: Scale) -> Path:
    return Path("runs") / "paper" / label / scale


def show_ours(cell: Cell | None, measure: str) -> str:
    """Accuracies in percent, times in seconds."""
    if cell is None:
        return "–"
    if measure in _SECONDS:
        return f"{cell.mean:.3g}" + ("" if cell.spread is None else f" ± {cell.spread:.2g}")
    return f"{100 * cell.mean:.2f}" + ("" if cell.spread is None else f" ± {100 * cell.spread:.2f}")
