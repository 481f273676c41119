"""Compares the runs of a recipe with the paper: a table for the terminal, what ran, and significant differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.console import Group

from sparsesam.lab.display import Table, cells, plural, to_rich
from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.experiment.run_directory import read_json
from sparsesam.lab.experiment.sweep import Job
from sparsesam.lab.experiment.variants import MIN_SEEDS, Variant, grouped, rank
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

    @property
    def finished(self) -> list[Job]:
        return [job for job in self.jobs if job.status == "finished"]

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

    def table(self) -> Group:
        """Returns the comparison for the terminal, in tables of four columns: our means over the seeds, ± their 95 %
        intervals, and the paper's numbers, at full scale beside ours.
        """
        recipe, numbers = self.recipe, self.numbers()
        rows = {row: [numbers.get((row, column.label), {}) for column in recipe.columns] for row in recipe.row_labels}
        columns = [
            (place, f"ours:\n{column.label}", [column.show(ours[place]) for ours in rows.values()])
            for place, column in enumerate(recipe.columns)
        ]
        for place, column in enumerate(recipe.at("full").columns if recipe.has_numbers else ()):
            printed = [dict(enumerate(recipe.rows[row]["paper"])).get(place) for row in rows]
            columns.append((place, f"paper:\n{column.label}", list(map(column.show_paper, printed))))
        if recipe.scale == "full":
            columns.sort(key=lambda column: column[0])  # the paper's beside ours
        seeds = [str(max(map(len, ours))) for ours in rows.values()]
        tables = []
        for first in range(0, len(columns), 4):
            shown = [(0, "", list(rows)), *columns[first : first + 4], (0, "our seeds", seeds)]
            _, headings, texts = zip(*shown, strict=True)
            lines = [cells(*line) for line in zip(*texts, strict=True)]
            tables.append(to_rich(Table("comparison", "", headings, lines), ""))
        tables[0].title = f"{recipe.place}: {recipe.title}"
        tables[-1].caption = f"{len(self.finished)} of {plural(len(self.jobs), 'run')}"
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
            if noise := sorted({config.label_noise for config in configs if config.label_noise}):
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
        numbers = self.numbers()
        if seeds := sorted({len(values) for values in numbers.values()}):
            machines = "; ".join(dict.fromkeys(map(_machine, self.finished)))
            count = plural(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
            yield f"On {machines}. {count} for each number; from three on, ± is the 95 % interval of the mean."
        for column in recipe.columns:
            found = {row: numbers[row, column.label] for row in recipe.row_labels if (row, column.label) in numbers}
            if column.relative_to is None and len(found) > 1:
                yield f"{column.label}: {_ranking(found, is_timed=column.is_timed)}"


def _ranking(found: Mapping[str, Mapping[int, float]], *, is_timed: bool) -> str:
    """Names the best row of a column, and the rows not significantly different from it."""
    ranking = rank(found, highest=not is_timed)
    if not ranking:
        return "no ranking with fewer than three seeds; --seeds 3 or more may show a difference."
    few = [row for row, values in found.items() if len(values) < MIN_SEEDS]
    best, *alike = ranking
    words = f"but does not differ significantly from {' and '.join(alike)} with these seeds"
    if not alike:
        words = "and differs significantly from every other row"
    end = f" Not ranked, fewer than three seeds: {', '.join(few)}." if few else ""
    return f"{best} is {'fastest' if is_timed else 'best'}, {words}.{end}"


def _machine(job: Job) -> str:
    made = read_json(job.files.result).get("provenance", {})
    threads = made.get("threads")
    parts = [made.get("gpu"), made.get("cpu"), plural(threads, "thread") if threads else None]
    parts.append(f"torch {made['torch']}" if "torch" in made else None)
    return ", ".join(str(part) for part in parts if part) or "an unknown machine"
