"""The paper's tables and figures as recipes: their runs at two scales, and the paper's numbers."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from sparsesam.lab.experiment.config import DEFAULTS, TrainConfig, from_mapping
from sparsesam.lab.experiment.sweep import Sweep
from sparsesam.lab.experiment.variants import half_width
from sparsesam.lab.names import check_names
from sparsesam.utils.checks import nearest

Scale = Literal["laptop", "full"]
#: Measures of time, from short separate runs, after warm-up; step times exclude mask refreshes.
TIMES = ("warm_seconds_per_step", "warm_seconds_per_epoch", "seconds_per_mask")


@dataclass(frozen=True)
class Column:
    """Shows ``measure`` of a run's result; with ``relative_to``, that row's measure divided by it."""

    label: str
    measure: str
    settings: Mapping[str, Any]
    relative_to: str | None = None

    @property
    def is_timed(self) -> bool:
        return self.measure in TIMES

    def show(self, values: Mapping[int, float]) -> str:
        """Format our mean over the seeds, ± its 95 % interval from three seeds on: percentages, seconds or factors."""
        if not values:
            return "–"
        scale = 1 if self.is_timed else 100
        form = ".3g" if self.is_timed and self.relative_to is None else ".2f"
        mean, width = statistics.fmean(values.values()), half_width(list(values.values()))
        text = f"{'' if self.relative_to is None else '×'}{scale * mean:{form}}"
        return text if width is None else f"{text} ± {scale * width:{form}}"

    def show_paper(self, number: float | None) -> str:
        """Format a number as the paper prints it."""
        if number is None:
            return "–"
        return f"{number:.2f}" if self.relative_to is None else f"×{number:g}"


@dataclass(frozen=True)
class Recipe:
    """A table or figure of the paper at one scale, with the overrides of --set; recipes.yaml describes the fields."""

    label: str
    place: str
    title: str
    rows: Mapping[str, Mapping[str, Any]]
    full: Mapping[str, Any]
    laptop: Mapping[str, Any] = field(default_factory=dict)
    aliases: Sequence[str] = ()
    figure: str | None = None
    forwards: int = 0
    notes: Sequence[str] = ()
    scale: Scale = "laptop"
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def at(self, scale: Scale, overrides: Mapping[str, Any] | None = None) -> Recipe:
        return replace(self, scale=scale, overrides=overrides or {})

    @property
    def names(self) -> list[str]:
        """The label, aliases and number in the paper, such as "Table 4"."""
        return [self.label, *self.aliases, self.place]

    @property
    def remarks(self) -> list[str]:
        """Notes on the table and on its runs at this scale."""
        return [*self.notes, *self._scaled.get("notes", ())]

    @property
    def has_numbers(self) -> bool:
        """Whether the paper prints numbers to compare ours with."""
        return any(row["paper"] for row in self.rows.values())

    @property
    def directory(self) -> Path:
        """The default directory of its runs; figures share their networks."""
        is_shared = self.figure is not None and not self.has_numbers
        return Path("runs") / "paper" / ("figures" if is_shared else self.label) / self.scale

    @property
    def _scaled(self) -> Mapping[str, Any]:
        return self.full if self.scale == "full" else self.laptop

    @property
    def analysis(self) -> dict[str, Any]:
        """Options of the figure's analysis."""
        return dict(self._scaled.get("analysis", {}))

    @property
    def columns(self) -> list[Column]:
        columns = []
        for label, own in self._scaled["columns"].items():
            settings = {**self._scaled.get("settings", {}), **own}
            measure, relative_to = settings.pop("measure", "test_accuracy"), settings.pop("relative_to", None)
            columns.append(Column(label, measure, settings, relative_to))
        return columns

    @property
    def sgd_settings(self) -> set[str]:
        return {name for column in self.columns for name in column.settings.get("sgd", {})}

    @property
    def row_labels(self) -> list[str]:
        return list(self._scaled.get("rows", self.rows))

    @property
    def cells(self) -> list[tuple[str, Column]]:
        """All pairs of row and column, without those the paper has no numbers for."""
        everywhere = itertools.product(self.row_labels, self.columns)
        return [(row, column) for row, column in everywhere if column.label not in self.rows[row].get("without", [])]

    def config(self, row: str, column: Column) -> TrainConfig:
        values = {**column.settings, **self.rows[row]["set"]}
        own = values.pop("sgd", {})
        return from_mapping({**values, **(own if values.get("optimizer") == "sgd" else {}), **self.overrides})

    @property
    def configs(self) -> list[TrainConfig]:
        return [self.config(row, column) for row, column in self.cells]

    def check_overrides(self) -> None:
        """Raise ValueError if a cell would not show what its row and column say, because they vary a setting."""
        check_names(self.overrides, DEFAULTS)
        if "seed" in self.overrides:
            raise ValueError("--set must not change seed; use --seeds for the number of seeds")
        own = self.at(self.scale).configs
        varied = {name for name in self.overrides if len({getattr(config, name) for config in own}) > 1}
        varied -= self.sgd_settings
        if varied or len({config.content_hash for config in self.configs}) < len({run.content_hash for run in own}):
            raise ValueError(
                f"--set must not change {', '.join(sorted(varied) or self.overrides)}: the runs of {self.label} differ "
                "in it, or in a setting that it disables; use `sparsesam train` for single runs"
            )

    def sweep(self, seeds: Sequence[int]) -> Sweep:
        """Returns all runs; columns with another measure of the same runs add none."""
        variants: dict[str, TrainConfig] = {}
        for row, column in self.cells:
            config = self.config(row, column)
            if config not in variants.values():
                variants[f"{row}, {column.label}"] = config
        return Sweep(f"{self.title} ({self.scale})", variants, seeds)

    def timed(self) -> set[TrainConfig]:
        """Returns the runs whose time is measured, with seed 0."""
        return {self.config(row, column).variant for row, column in self.cells if column.is_timed}


@cache
def recipes() -> dict[str, Recipe]:
    content = yaml.safe_load((resources.files("sparsesam.lab.paper") / "recipes.yaml").read_text())
    return {label: Recipe(label, **fields) for label, fields in content["recipes"].items()}


def recipe(name: str) -> Recipe:
    """Find a recipe by its LaTeX label in the paper, with or without prefix, an alias, or its number: "figure 7"."""
    as_written = {known: found for found in recipes().values() for known in found.names}
    plain = {_plain(known): found for known, found in as_written.items() if ":" not in known}
    found = as_written.get(name) or plain.get(_plain(name))
    if found is None:
        meant = nearest(name, as_written, otherwise="no name is similar;")
        raise ValueError(f"unknown table or figure {name!r}; {meant} `sparsesam paper list` lists all")
    return found


def _plain(name: str) -> str:
    """Reduce to letters and digits: "Figure 7", "fig. 7" and "fig7" are one name, and "fig:hessian" is "hessian"."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower().replace("figure", "fig").replace("table", "tab"))
    return re.sub(r"^(fig|tab)(?=[a-z])", "", plain)
