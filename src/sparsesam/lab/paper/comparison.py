"""Compares the runs of a recipe with the paper: a table for the terminal, what ran, and significant differences."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from rich.console import Console, Group

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

    def compared(self) -> Table:
        """Returns a table of our means over the seeds, ± their 95 % intervals, beside the paper's numbers."""
        recipe, numbers, lines = self.recipe, self.numbers(), []
        columns, theirs = recipe.columns, recipe.at("full").columns if recipe.has_numbers else []
        headings = [*(f"ours: {column.label}" for column in columns), *(f"paper: {column.label}" for column in theirs)]
        order = list(range(len(headings)))
        if recipe.scale == "full" and theirs:  # the same columns: ours and the paper's side by side
            order.sort(key=lambda place: place % len(theirs))
        for row in recipe.row_labels:
            found = [numbers.get((row, column.label), {}) for column in columns]
            shown = [column.show(values) for column, values in zip(columns, found, strict=True)]
            printed = itertools.zip_longest(theirs, recipe.rows[row]["paper"][: len(theirs)])
            shown += [column.show_paper(number) for column, number in printed]
            lines.append(cells(row, *(shown[place] for place in order), max(map(len, found))))
        return Table("comparison", "", ["", *(headings[place] for place in order), "our seeds"], lines)

    def table(self) -> Group:
        """Returns the comparison for the terminal, in several tables where one would be too wide."""
        recipe, console, unlimited = self.recipe, Console(), Console(width=10_000)
        compared, step = self.compared(), 2 if recipe.scale == "full" and recipe.has_numbers else 1
        *columns, seeds = range(1, len(compared.columns))
        parts: list[list[int]] = [[]]
        for together in (columns[place : place + step] for place in range(0, len(columns), step)):
            wider = to_rich(_part(compared, [0, *parts[-1], *together, seeds]), "")
            if parts[-1] and unlimited.measure(wider).maximum > console.width:
                parts.append([])
            parts[-1] += together
        drawn = [to_rich(_part(compared, [0, *part, seeds]), "") for part in parts]
        drawn[0].title = f"{recipe.place}: {recipe.title}"
        drawn[-1].caption = f"{sum(job.is_finished for job in self.jobs)} of {plural(len(self.jobs), 'run')}"
        return Group(*drawn)

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


def _part(table: Table, places: Sequence[int]) -> Table:
    """Returns the columns at these places, with narrow headings."""
    rows = [[row[place] for place in places] for row in table.rows]
    return replace(table, columns=[table.columns[place].replace(": ", ":\n", 1) for place in places], rows=rows)


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
