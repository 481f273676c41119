"""The source of each setting of a recipe: the paper's text, its authors' published settings, or our choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any

import yaml

from sparsesam.lab.experiment.config import DEFAULTS, TrainConfig, unused
from sparsesam.lab.paper.recipe import Recipe

_SOURCES = {
    "paper": "from the paper: {}",
    "authors": "from the authors' published settings: {}",
    "ours": "ours, because {}",
}


#: The mark of settings at their default.
UNMENTIONED = _SOURCES["ours"].format("the text does not mention it")


@dataclass(frozen=True)
class SettingSource:
    """A setting or another decision; ``mark`` says where its ``values`` come from."""

    name: str
    values: tuple[str, ...]
    mark: str


def settings_of(recipe: Recipe) -> list[SettingSource]:
    """Returns every setting that the runs of the recipe use, once for each mark it has."""
    found: dict[str, dict[str, list[str]]] = {name: {} for name in DEFAULTS if name != "seed"}
    for row, column in recipe.cells:
        config = recipe.config(row, column)
        for name in found.keys() - set(unused(config)):
            found[name].setdefault(_mark(name, recipe, config), []).append(str(getattr(config, name)))
    return [
        SettingSource(name, tuple(dict.fromkeys(values)), mark)
        for name, marks in found.items()
        for mark, values in marks.items()
    ]


def other_choices(recipe: Recipe) -> list[SettingSource]:
    """Returns the decisions behind a recipe that are not settings; without runs, those that name the recipe."""
    configs = [recipe.config(row, column) for row, column in recipe.cells]
    return [
        SettingSource(one["name"], (one["what"],), _SOURCES[one["from"]].format(one["say"]))
        for one in read_choices()["choices"]
        if any(_fits(one.get("when", {}), recipe, config) for config in configs)
        or (not configs and recipe.label in _listed(one.get("when", {}).get("recipe", [])))
    ]


def _mark(name: str, recipe: Recipe, config: TrainConfig) -> str:
    if name in recipe.overrides:
        return _SOURCES["ours"].format("--set says so")
    if recipe.scale == "laptop":
        return _SOURCES["ours"].format("the laptop scale must take minutes on a CPU")
    value = getattr(config, name)
    for rule in read_choices()["settings"].get(name, []):
        if rule.get("value", value) == value and _fits(rule.get("when", {}), recipe, config):
            return _SOURCES[rule["from"]].format(rule["say"])
    if value == DEFAULTS[name]:
        return UNMENTIONED
    raise ValueError(f"{recipe.label}: choices.yaml does not say where {name}={value} comes from")


def _fits(wanted: Mapping[str, Any], recipe: Recipe, config: TrainConfig) -> bool:
    """Whether each name in ``wanted`` has a value that matches one of its patterns; "not" negates what is under it."""
    for name, patterns in wanted.items():
        if name == "not":
            fits = not _fits(patterns, recipe, config)
        else:
            value = recipe.label if name == "recipe" else str(getattr(config, name))
            fits = any(fnmatchcase(value, str(pattern)) for pattern in _listed(patterns))
        if not fits:
            return False
    return True


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@cache
def read_choices() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((resources.files("sparsesam.lab.paper") / "choices.yaml").read_text())
    return content
