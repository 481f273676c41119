"""The command line's parser: short errors that name the nearest options."""

from __future__ import annotations

import dataclasses
import re
import sys
import typing
from collections.abc import Mapping
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace
from jsonargparse._actions import ActionConfigFile

from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.names import nearest
from sparsesam.lab.experiment.setting_types import describe


class Parser(ArgumentParser):
    """Options with typed values; ``--config FILE.yaml`` gives any of them, and those after it win."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """One line that says what is wrong, and where there is one, the name that was meant."""
        unknown = re.findall(r"(?<!\S)--([\w-]+)", message) if "nrecognized arguments" in message else []
        unknown += re.findall(r"Option '([^']+)' is not accepted", message)
        if unknown:
            known = [name for action in self._actions for name in _spellings(action.option_strings)]
            lines = [f"unknown option {name!r}; {nearest(name.replace('_', '-'), known)}" for name in unknown]
        else:
            kinds = {action.dest: getattr(action, "_typehint", None) for action in self._actions}
            lines = [_shortened(message, kinds)]
        for line in lines:
            print(f"{self.prog}: {line}", file=sys.stderr)
        sys.exit(2)


def add_settings(parser: ArgumentParser, *, leave_out: tuple[str, ...] = ()) -> None:
    """An option for every field of a run, and ``--config`` for a file of them."""
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of the options below")
    for kind in (TrainConfig, RunEnvironment):
        hints = typing.get_type_hints(kind)
        for one in dataclasses.fields(kind):
            if one.name in leave_out:
                continue
            name, text = f"--{one.name.replace('_', '-')}", one.metadata["help"]
            if one.name == "resume":
                parser.add_argument(name, action="store_true", help=text)
            else:
                parser.add_argument(name, type=hints[one.name], default=one.default, help=text)


def settings_of(options: Namespace) -> tuple[TrainConfig, RunEnvironment]:
    values: dict[str, Any] = options.as_dict()
    config, place = (
        kind(**{one.name: values[one.name] for one in dataclasses.fields(kind) if one.name in values})
        for kind in (TrainConfig, RunEnvironment)
    )
    assert isinstance(config, TrainConfig)
    assert isinstance(place, RunEnvironment)
    return config, place


def _spellings(options: Any) -> list[str]:
    return [option.removeprefix("--") for option in options if option.startswith("--")]


def _shortened(message: str, kinds: Mapping[str, Any]) -> str:
    """Jsonargparse's type errors in one line, in our words; ``kinds`` are the options' types."""
    found = re.search(r'Parser key "([^"]+)":\s*(.*)', message, re.DOTALL)
    if found is None:
        return message.strip()
    reason = " ".join(found[2].split())
    if choices := re.fullmatch(r"Expected a typing\.Literal\[(.*)\]\. Got value: (.*)", reason):
        reason = f"must be one of {choices[1]}, got {choices[2]!r}"
    elif kind := re.fullmatch(r"Expected a <class '(\w+)'>\. Got value: (.*)", reason):
        reason = f"must be of type {kind[1]}, got {kind[2]!r}"
    elif given := re.search(r"^Does not validate against any .* Given value: (.*)", reason):
        reason = f"must be {describe(kinds[found[1]])}, got {given[1]!r}"
    return f"--{found[1].replace('_', '-')} {reason}"
