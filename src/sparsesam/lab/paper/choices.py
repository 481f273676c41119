"""The source of each setting of a recipe: the paper's text, its authors' published settings, or our choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import yaml

from sparsesam.lab.experiment.config import DEFAULTS, TrainConfig, unused
from sparsesam.lab.paper.recipe import Recipe

_SOURCES = {
    "paper": "from the paper: {}",
    "authors": "from the authors' published settings: {}",
    "ours": "ours, because {}",
}


class Source(NamedTuple):
    """A setting or another decision; ``mark`` says where its ``values`` come from."""

    name: str
    values: tuple[str, ...]
    mark: str


def settings_of(recipe: Recipe) -> list[Source]:
    """Returns every setting that the runs use, once for each mark; those at their default as one, the last."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for config in recipe.configs:
        for name in DEFAULTS.keys() - unused(config) - {"seed"}:
            found.setdefault((name, _mark(name, recipe, config)), {})[str(getattr(config, name))] = None
    others = Source("every other", ("its default",), _SOURCES["ours"].format(read_choices()[recipe.scale]["*"]))
    marked = [Source(name, tuple(values), mark) for (name, mark), values in found.items()]
    shown = [source for source in marked if source[1:] != ((str(DEFAULTS[source.name]),), others.mark)]
    return [*sorted(shown, key=lambda source: list(DEFAULTS).index(source.name)), others] if marked else []


def other_choices(recipe: Recipe) -> list[Source]:
    """Returns the decisions behind a recipe that are not settings; without runs, those that name the recipe."""
    configs: Sequence[TrainConfig | None] = recipe.configs or [None]
    return [
        Source(choice["name"], (choice["what"],), _SOURCES[choice["from"]].format(choice["say"]))
        for choice in read_choices()["choices"]
        if any(_fits(choice["when"], recipe, config) for config in configs)
    ]


def _mark(name: str, recipe: Recipe, config: TrainConfig) -> str:
    if name in recipe.overrides:
        return _SOURCES["ours"].format("--set says so")
    rules, value = read_choices()[recipe.scale], getattr(config, name)
    for rule in rules.get(name, []):
        if rule.get("value", value) == value and _fits(rule.get("when", {}), recipe, config):
            return _SOURCES[rule["from"]].format(rule["say"])
    if recipe.scale == "full" and value != DEFAULTS[name]:
        raise ValueError(f"{recipe.label}: choices.yaml does not say where {name}={value} comes from")
    return _SOURCES["ours"].format(rules["*"])


def _fits(wanted: Mapping[str, Any], recipe: Recipe, config: TrainConfig | None) -> bool:
    """Whether each name in ``wanted`` has a value that matches one of its patterns."""
    values = {**(vars(config) if config else {}), "recipe": recipe.label}
    listed = {name: patterns if isinstance(patterns, list) else [patterns] for name, patterns in wanted.items()}
    return all(
        any(fnmatchcase(str(values.get(name, "")), str(pattern)) for pattern in patterns)
        for name, patterns in listed.items()
    )


@cache
def read_choices() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((resources.files("sparsesam.lab.paper") / "choices.yaml").read_text())
    return content
