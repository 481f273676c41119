"""The paper's tables and figures as recipes: their runs at two scales, and the paper's own numbers beside ours."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from sparsesam.lab.display import Cell, Table, cells, number_cell
from sparsesam.lab.experiment.confidence import confidence_interval
from sparsesam.lab.experiment.config import DEFAULTS, TrainConfig, from_mapping
from sparsesam.lab.experiment.sweep import Job, Sweep
from sparsesam.lab.names import nearest

Scale = Literal["laptop", "full"]
Finished = dict[TrainConfig, list[dict[str, Any]]]
#: Measures of time: of short runs that nothing else disturbs, warm, and of steps without the masks they make.
TIMES = ("warm_seconds_per_step", "warm_seconds_per_epoch", "seconds_per_mask")
#: Figures share their networks, under names that say what they are.
_SHARED_DIRECTORY = "figures"


@dataclass(frozen=True)
class Column:
    """``measure`` of a run's result; with ``relative_to``, that row's measure divided by it."""

    label: str
    measure: str
    settings: Mapping[str, Any]
    relative_to: str | None = None

    @property
    def is_timed(self) -> bool:
        return self.measure in TIMES


@dataclass(frozen=True)
class MeanOverSeeds:
    """Our number in a table: at least one seed's value."""

    values: Mapping[int, float]
    kind: Literal["share", "seconds", "speed"]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean; None for one seed."""
        highest = 1.0 if self.kind == "share" else math.inf
        return confidence_interval(list(self.values.values()), lowest=0.0, highest=highest)


@dataclass(frozen=True)
class Recipe:
    """A table: a config for each row and column, and the paper's numbers by row in the order of the full columns."""

    label: str
    title: str
    content: Mapping[str, Any]

    @property
    def place(self) -> str:
        """Its number in the paper, such as "Table 4"."""
        return str(self.content["place"])

    @property
    def names(self) -> list[str]:
        """Its label and aliases."""
        return [self.label, *self.content.get("aliases", [])]

    def notes(self, scale: Scale) -> list[str]:
        """Notes on the table, at full scale also on its networks."""
        return [*self.content.get("notes", []), *(self.content.get("full_notes", []) if scale == "full" else [])]

    @property
    def figure(self) -> str | None:
        """The name of its figure; None for a table."""
        return self.content.get("figure")

    @property
    def has_numbers(self) -> bool:
        """Whether the paper prints numbers to compare ours with."""
        return any(self.paper(row) for row in self.rows("full"))

    def columns(self, scale: Scale) -> list[Column]:
        shared = self.content[scale].get("settings", {})
        columns = []
        for label, own in self.content[scale]["columns"].items():
            settings = {**shared, **own}
            measure, relative_to = settings.pop("measure", "test_accuracy"), settings.pop("relative_to", None)
            columns.append(Column(label, measure, settings, relative_to))
        return columns

    def rows(self, scale: Scale) -> list[str]:
        return list(self.content[scale].get("rows", self.content["rows"]))

    def cells(self, scale: Scale) -> list[tuple[str, Column]]:
        """Every row and column that is there; the paper has no numbers for some."""
        return [
            (row, column)
            for row in self.rows(scale)
            for column in self.columns(scale)
            if column.label not in self.content["rows"][row].get("without", [])
        ]

    def paper(self, row: str) -> list[float]:
        return list(self.content["rows"][row]["paper"])

    def printed(self, row: str) -> list[tuple[Column, float | None]]:
        """The paper's columns with its numbers; none where it prints none at all."""
        columns = self.columns("full") if self.has_numbers else []
        return list(itertools.zip_longest(columns, self.paper(row)[: len(columns)]))

    def config(self, row: str, column: Column, overrides: Mapping[str, Any]) -> TrainConfig:
        values = {**column.settings, **self.content["rows"][row]["set"]}
        sgd_weight_decay = values.pop("sgd_weight_decay", None)
        if values.get("optimizer") == "sgd" and sgd_weight_decay is not None:
            values["weight_decay"] = sgd_weight_decay
        return from_mapping(TrainConfig, {**values, **overrides})

    def check_overrides(self, scale: Scale, overrides: Mapping[str, Any]) -> None:
        """ValueError where one run would be printed in several cells, for example because rows vary a setting."""
        if "seed" in overrides:
            raise ValueError("--set must not change seed; --seeds says how many there are")
        for name in self.varied(scale) & overrides.keys():
            raise ValueError(
                f"--set must not change {name}: the runs of {self.label} differ in it, and would be one run in "
                f"several cells; `sparsesam train --{name.replace('_', '-')} …` makes a run of your own"
            )
        if len(self._identities(scale, overrides)) < len(self._identities(scale, {})):
            changed = " ".join(f"{name}={value}" for name, value in overrides.items())
            raise ValueError(
                f"--set {changed} makes different runs of {self.label} the same, which would be one run in several "
                "cells; leave out what makes a setting of the rows meaningless"
            )

    def _identities(self, scale: Scale, overrides: Mapping[str, Any]) -> set[tuple[str, bool]]:
        cells = self.cells(scale)
        return {(self.config(row, column, overrides).content_hash, column.is_timed) for row, column in cells}

    def varied(self, scale: Scale) -> set[str]:
        """The settings that runs of the table differ in; runs for times are apart."""
        cells = [(self.config(row, column, {}), column.is_timed) for row, column in self.cells(scale)]
        groups = [[config for config, is_timed in cells if is_timed is timed] for timed in (False, True)]
        return {name for name in DEFAULTS for group in groups if len({getattr(one, name) for one in group}) > 1}

    def sweep(self, scale: Scale, seeds: Sequence[int], overrides: Mapping[str, Any]) -> Sweep:
        """All runs; columns that only measure something else of the same runs add none."""
        variants: dict[str, TrainConfig] = {}
        for row, column in self.cells(scale):
            config = self.config(row, column, overrides)
            if config not in variants.values():
                variants[f"{row}, {column.label}"] = config
        return Sweep(f"{self.title} ({scale})", variants, seeds)

    def timed(self, scale: Scale, overrides: Mapping[str, Any]) -> set[TrainConfig]:
        """The runs whose time is measured, with seed 0."""
        return {self.config(row, column, overrides) for row, column in self.cells(scale) if column.is_timed}

    def cell(self, row: str, column: Column, finished: Finished, overrides: Mapping[str, Any]) -> MeanOverSeeds | None:
        values = self._values(row, column, finished, overrides)
        if column.relative_to is not None:
            reference = self._values(column.relative_to, column, finished, overrides)
            values = {seed: reference[seed] / value for seed, value in values.items() if seed in reference}
        if not values:
            return None
        kind: Literal["share", "seconds", "speed"]
        kind = "speed" if column.relative_to is not None else "seconds" if column.is_timed else "share"
        return MeanOverSeeds(values, kind)

    def comparison(self, scale: Scale, finished: Finished, overrides: Mapping[str, Any], caption: str = "") -> Table:
        """Ours, the mean over the seeds with its 95 % interval, and beside it the paper's."""
        columns, theirs = self.columns(scale), self.columns("full") if self.has_numbers else []
        lines = []
        for row in self.rows(scale):
            found = [self.cell(row, column, finished, overrides) for column in columns]
            ours = [Cell(show_ours(cell), order=cell.mean if cell else None) for cell in found]
            paper = [Cell(show_theirs(number, column), order=number) for column, number in self.printed(row)]
            seeds = max((len(cell.values) for cell in found if cell), default=0)
            lines.append(cells(row, *ours, *paper, number_cell(seeds)))
        headings = [*(f"ours: {column.label}" for column in columns), *(f"paper: {column.label}" for column in theirs)]
        return Table(f"paper-{self.label}-{scale}", caption, ["", *headings, "our seeds"], lines)

    def _values(self, row: str, column: Column, finished: Finished, overrides: Mapping[str, Any]) -> dict[int, float]:
        results = finished.get(replace(self.config(row, column, overrides).canonical, seed=0), [])
        found = {result.get("seed", place): result[column.measure] for place, result in enumerate(results)}
        return {seed: value for seed, value in found.items() if value is not None}


def finished_results(jobs: Sequence[Job]) -> Finished:
    """The results there are, each with its seed, by canonical config with seed 0."""
    found: Finished = {}
    for job in jobs:
        if (result := job.result) is not None:
            found.setdefault(replace(job.config.canonical, seed=0), []).append({**result, "seed": job.config.seed})
    return found


@cache
def recipes() -> dict[str, Recipe]:
    content = yaml.safe_load((resources.files("sparsesam.lab.paper") / "recipes.yaml").read_text())
    return {label: Recipe(label, one["title"], one) for label, one in content["recipes"].items()}


def recipe(name: str) -> Recipe:
    """By its label in the paper, also with LaTeX's prefix, by another name, or by its number: "figure 7"."""
    everything = recipes().values()
    as_written = {one: found for found in everything for one in found.names}
    plain = _plain(name)
    known = {_plain(one): found for found in everything for one in (*found.names, found.place) if ":" not in one}
    if name not in as_written and plain not in known:
        names = [one for found in everything for one in (*found.names, found.place)]
        meant = nearest(name, names, otherwise="no name is similar;")
        raise ValueError(f"unknown table or figure {name!r}; {meant} `sparsesam paper list` lists all")
    return as_written.get(name) or known[plain]


def _plain(name: str) -> str:
    """Letters and digits: "Figure 7", "fig. 7" and "fig7" are one name, and "fig:hessian" is "hessian"."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower().replace("figure", "fig").replace("table", "tab"))
    return re.sub(r"^(fig|tab)(?=[a-z])", "", plain)


def default_out(chosen: Recipe, scale: Scale) -> Path:
    is_shared = chosen.figure is not None and not chosen.has_numbers
    return Path("runs") / "paper" / (_SHARED_DIRECTORY if is_shared else chosen.label) / scale


def show_ours(cell: MeanOverSeeds | None) -> str:
    """A mean and its 95 % interval: percentages, seconds or factors."""
    if cell is None:
        return "–"
    scale, form = {"share": (100.0, ".2f"), "seconds": (1.0, ".3g"), "speed": (1.0, ".2f")}[cell.kind]
    text = f"{'×' if cell.kind == 'speed' else ''}{scale * cell.mean:{form}}"
    interval = cell.interval
    return text if interval is None else f"{text} ({scale * interval[0]:{form}} to {scale * interval[1]:{form}})"


def show_theirs(number: float | None, column: Column) -> str:
    if number is None:
        return "–"
    return f"×{number:g}" if column.relative_to is not None else f"{number:.2f}"
