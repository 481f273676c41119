"""Compares the runs of a recipe with the paper: a table for the terminal, what ran, and significant differences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table as RichTable

from sparsesam.lab.display import Table, cells, plural, to_rich
from sparsesam.lab.experiment.confidence import MIN_SEEDS, rank
from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.experiment.run_directory import RunDirectory
from sparsesam.lab.experiment.sweep import Job
from sparsesam.lab.experiment.variants import Variant, grouped
from sparsesam.lab.paper.recipe import Column, Recipe


@dataclass(frozen=True)
class RecipeRuns:
    """The runs of a recipe and the directory of their data."""

    recipe: Recipe
    jobs: Sequence[Job]
    data_dir: Path | None = None

    @cached_property
    def _by_settings(self) -> dict[TrainConfig, list[Job]]:
        return grouped(self.jobs, lambda job: job.config.variant)

    def of(self, row: str, column: Column) -> Variant[Job]:
        """Returns the runs of a cell."""
        config = self.recipe.config(row, column).variant
        return Variant(row, config, self._by_settings.get(config, []))

    def numbers(self) -> dict[tuple[str, str], dict[int, float]]:
        """Returns our numbers by row and column, then by seed, for finished runs."""
        found = {}
        for row, column in self.recipe.cells:
            values = self.of(row, column).by_seed(column.measure)
            if column.relative_to is not None:
                reference = self.of(column.relative_to, column).by_seed(column.measure)
                values = {seed: reference[seed] / value for seed, value in values.items() if seed in reference}
            if values:
                found[row, column.label] = values
        return found

    def _columns(self) -> list[dict[str, list[str]]]:
        """Returns groups of columns, texts of all rows by heading: our means over the seeds, ± their 95 % intervals,
        and the paper's numbers; at full scale in pairs.
        """
        recipe, rows, numbers = self.recipe, self.recipe.row_labels, self.numbers()
        ours = [
            {f"ours:\n{column.label}": [column.show(numbers.get((row, column.label), {})) for row in rows]}
            for column in recipe.columns
        ]
        printed = [dict(enumerate(recipe.rows[row]["paper"])) for row in rows]
        theirs = [
            {f"paper:\n{column.label}": [column.show_paper(row.get(place)) for row in printed]}
            for place, column in enumerate(recipe.at("full").columns if recipe.has_numbers else ())
        ]
        if recipe.scale == "full" and theirs:
            return [first | second for first, second in zip(ours, theirs, strict=True)]
        return [*ours, *theirs]

    def table(self) -> Group:
        """Returns the comparison for the terminal, in several tables where one would be too wide."""
        recipe, numbers, console, unlimited = self.recipe, self.numbers(), Console(), Console(width=10_000)
        found = [[numbers.get((row, column.label), {}) for column in recipe.columns] for row in recipe.row_labels]
        seeds = [max(map(len, values)) for values in found]

        def drawn(columns: dict[str, list[str]]) -> RichTable:
            lines = zip(recipe.row_labels, *columns.values(), seeds, strict=True)
            rows = [cells(*line) for line in lines]
            return to_rich(Table("comparison", "", ["", *columns, "our seeds"], rows), "")

        parts: list[dict[str, list[str]]] = [{}]
        for together in self._columns():
            if parts[-1] and unlimited.measure(drawn(parts[-1] | together)).maximum > console.width:
                parts.append({})
            parts[-1] |= together
        tables = [drawn(part) for part in parts]
        tables[0].title = f"{recipe.place}: {recipe.title}"
        tables[-1].caption = f"{sum(job.is_finished for job in self.jobs)} of {plural(len(self.jobs), 'run')}"
        return Group(*tables)

    def sentences(self) -> Iterator[str]:
        """Yield what the table does not show: what ran, on which machine, and which differences are significant."""
        recipe, configs = self.recipe, [job.config for job in self.jobs]
        trained = ", ".join(dict.fromkeys(f"{config.model} on {config.dataset}" for config in configs))
        yield f"Ours: {trained}; {recipe.scale} scale."
        if recipe.overrides:
            changed = ", ".join(f"{name}={value}" for name, value in recipe.overrides.items())
            yield f"Overridden by --set in every run: {changed}. These are not the recipe's own settings."
        if recipe.scale == "laptop":
            noise = sorted({config.label_noise for config in configs if config.label_noise})
            if noise:
                shares = " or ".join(f"{100 * share:g} %" for share in noise)
                yield f"{shares} of the training labels are wrong; the test labels are clean."
            yield "Network and data are not the paper's: compare rows, not values."
            if recipe.sgd_settings:
                tuned = ", ".join(sorted(recipe.sgd_settings))
                yield f"SGD's {tuned} were tuned on validation images, the others' were not; `paper show` lists them."
        yield from recipe.remarks
        if any(column.is_timed for column in recipe.columns):
            yield (
                "Times are measured in separate short runs, one at a time: medians over the steps after the first "
                "five, without mask refreshes and loading of images; for mask refreshes, medians without the first."
            )
        cells = self.numbers()
        seeds = sorted({len(values) for values in cells.values()})
        if seeds:
            machines = "; ".join(dict.fromkeys(_machine(job) for job in self.jobs if job.is_finished))
            count = plural(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
            intervals = "± is the 95 % interval of the mean (Student's t)"
            if seeds[-1] < MIN_SEEDS:
                intervals = "fewer than three seeds have no interval"
            yield f"On {machines}. {count} for each number; {intervals}."
        for column in recipe.columns:
            found = {row: cells[row, column.label] for row in recipe.row_labels if (row, column.label) in cells}
            if column.relative_to is None and len(found) > 1:
                yield _best_of(column, found)


def _best_of(column: Column, found: Mapping[str, Mapping[int, float]]) -> str:
    """Describe the best row of a column, and the rows not significantly different from it."""
    ranking = rank(found, highest=not column.is_timed)
    if ranking is None:
        return f"{column.label}: no ranking with fewer than three seeds; --seeds 3 or more may show a difference."
    few = [row for row, values in found.items() if len(values) < MIN_SEEDS]
    others, alike = len(found) - len(few) - 1, [row for row in ranking.alike if row != ranking.best]
    start = f"{column.label}: {ranking.best} is {'fastest' if column.is_timed else 'best'}"
    end = f" Not ranked, fewer than three seeds: {', '.join(few)}." if few else ""
    if not alike:
        return f"{start}; it differs significantly from every other row.{end}"
    rows = "any other row" if len(alike) == others else " and ".join(alike)
    return f"{start}, but does not differ significantly from {rows} with these seeds.{end}"


def _machine(job: Job) -> str:
    made = json.loads(RunDirectory(job.directory).result.read_text()).get("provenance", {})
    threads = made.get("threads")
    parts = [made.get("gpu"), made.get("cpu"), plural(threads, "thread") if threads else None]
    parts.append(f"torch {made['torch']}" if "torch" in made else None)
    return ", ".join(str(part) for part in parts if part) or "an unknown machine"
