"""Our numbers beside the paper's, for runs that belong to one of its tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from sparsesam.lab.display import Table, plural
from sparsesam.lab.experiment.config import TrainConfig, names_of
from sparsesam.lab.paper.recipe import Recipe, Scale, finished_results, recipes
from sparsesam.lab.report.data import ReportData
from sparsesam.lab.report.page import Part
from sparsesam.lab.report.read_run import RunRecord
from sparsesam.lab.report.variants import setting_name


def paper_parts(data: ReportData) -> list[Part]:
    known = [(run, run.config) for run in data.runs if run.config is not None]
    scaled = [recipe.at(scale) for recipe in recipes().values() if recipe.has_numbers for scale in get_args(Scale)]
    tables = [_table(recipe, known) for recipe in scaled]
    return [Part("", [table for table in tables if table is not None])]


def _table(recipe: Recipe, known: Sequence[tuple[RunRecord, TrainConfig]]) -> Table | None:
    """Recognize a table by the directory that `paper run` writes to, or else by a run for each of its cells."""
    here = [pair for pair in known if pair[0].path.resolve().parts[-3:-1] == (recipe.label, recipe.scale)]
    finished = finished_results((config, run.result) for run, config in here or known)
    if not here and len(recipe.numbers(finished)) < len(recipe.cells):
        return None
    recipe = recipe.at(recipe.scale, _overrides(recipe, [config for _, config in here]))
    return recipe.comparison(finished, _caption(recipe, len(here)))


def _overrides(recipe: Recipe, configs: list[TrainConfig]) -> dict[str, Any]:
    """Returns what `paper run --set` changed: settings that the table does not vary and that all its runs share."""
    if not configs:
        return {}
    in_cells = [recipe.config(row, column).canonical for row, column in recipe.cells]
    changed = {}
    for name in names_of(TrainConfig):
        planned, ran = ({(one.optimizer, getattr(one, name)) for one in some} for some in (in_cells, configs))
        is_free = name in recipe.sgd_settings or len({value for _, value in planned}) == 1
        if name != "seed" and is_free and len({value for _, value in ran}) == 1 and not ran <= planned:
            changed[name] = ran.pop()[1]
    return changed


def _caption(recipe: Recipe, runs: int) -> str:
    count = f", {plural(runs, 'run')}" if runs else ""
    parts = [f"{recipe.title} ({recipe.label}, {recipe.scale} scale{count})."]
    if recipe.scale == "laptop":
        parts.append("The data set is not the paper’s: compare the differences between rows, not the values.")
    if recipe.overrides:
        changed = ", ".join(setting_name(name, value) for name, value in recipe.overrides.items())
        parts.append(f"Ours were run with {changed} instead of the recipe’s.")
    return " ".join(parts)
