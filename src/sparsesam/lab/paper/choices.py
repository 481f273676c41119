"""Where each setting of a recipe comes from: the paper's text, its authors' published settings, or us."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml

from sparsesam.lab.experiment.config import DEFAULTS, TrainConfig, unused
from sparsesam.lab.paper.recipe import Recipe, Scale

_ORIGINS = {
    "paper": "from the paper: {}",
    "authors": "from the authors' published settings: {}",
    "ours": "ours, because {}",
}
_LAPTOP = "the laptop scale is to take minutes on a CPU"


@dataclass(frozen=True)
class Mark:
    """Where a choice comes from, and the place or the reason."""

    origin: Literal["paper", "authors", "ours"]
    say: str

    def __str__(self) -> str:
        return _ORIGINS[self.origin].format(self.say)


#: Of settings that have their default.
UNMENTIONED = Mark("ours", "the text does not mention it")


@dataclass(frozen=True)
class Choice:
    """A setting or another decision; ``values`` are those of the runs that the mark holds for."""

    name: str
    values: tuple[str, ...]
    mark: Mark


def settings_of(chosen: Recipe, scale: Scale, overrides: Mapping[str, Any] | None = None) -> list[Choice]:
    """Every setting that means something for a run of the recipe, once for each mark it has."""
    found: dict[tuple[str, Mark], dict[str, None]] = {}
    for row, column in chosen.cells(scale):
        config = chosen.config(row, column, overrides or {})
        without = {*unused(config), "seed"}
        for name in (name for name in DEFAULTS if name not in without):
            mark = _mark(name, chosen, scale, config, overrides or {})
            found.setdefault((name, mark), {})[str(getattr(config, name))] = None
    order = {name: place for place, name in enumerate(DEFAULTS)}
    return [
        Choice(name, tuple(values), mark)
        for (name, mark), values in sorted(found.items(), key=lambda one: order[one[0][0]])
    ]


def other_choices(chosen: Recipe, scale: Scale) -> list[Choice]:
    """The decisions behind a recipe that are no settings."""
    configs = [chosen.config(row, column, {}) for row, column in chosen.cells(scale)]
    found = []
    for one in read_choices()["choices"]:
        wanted = one.get("when", {})
        if any(_fits(wanted, chosen, config) for config in configs) or (not configs and _names_recipe(wanted, chosen)):
            found.append(Choice(one["name"], (one["what"],), Mark(one["from"], one["say"])))
    return found


def _mark(name: str, chosen: Recipe, scale: Scale, config: TrainConfig, overrides: Mapping[str, Any]) -> Mark:
    if name in overrides:
        return Mark("ours", "--set says so")
    if scale == "laptop":
        return Mark("ours", _LAPTOP)
    value = getattr(config, name)
    for rule in read_choices()["settings"].get(name, []):
        if "value" in rule and rule["value"] != value:
            continue
        if _fits(rule.get("when", {}), chosen, config):
            return Mark(rule["from"], rule["say"])
    if value == DEFAULTS[name]:
        return UNMENTIONED
    raise ValueError(f"{chosen.label}: choices.yaml does not say where {name}={value} comes from")


def _fits(wanted: Mapping[str, Any], chosen: Recipe, config: TrainConfig) -> bool:
    for name, patterns in wanted.items():
        if name == "not":
            if _fits(patterns, chosen, config):
                return False
            continue
        value = chosen.label if name == "recipe" else str(getattr(config, name))
        if not any(fnmatchcase(value, str(pattern)) for pattern in _listed(patterns)):
            return False
    return True


def _names_recipe(wanted: Mapping[str, Any], chosen: Recipe) -> bool:
    """Whether a choice is made for a recipe that trains nothing."""
    return list(wanted) == ["recipe"] and chosen.label in _listed(wanted["recipe"])


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@cache
def read_choices() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((resources.files("sparsesam.lab.paper") / "choices.yaml").read_text())
    return content
