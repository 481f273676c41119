"""The command line's parser: argparse, with options made from dataclasses and checked as their YAML keys are.

Values are converted and refused by `sparsesam.lab.experiment.setting_types`, wherever they come from.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import typing
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import yaml

from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig, names_of
from sparsesam.lab.experiment.setting_types import alternatives, choices, convert
from sparsesam.lab.names import check_names, nearest

__all__ = ["ArgumentParser", "Namespace", "Parser", "add_settings", "settings_from"]


class UsageError(Exception):
    """A value that an option does not take."""


class Parser(ArgumentParser):
    """argparse with any type hint as ``type``, errors of one line, and the nearest names for unknown options."""

    def __init__(self, prog: str, description: str, **options: Any) -> None:
        width = min(110, shutil.get_terminal_size().columns) - 2
        layout = partial(argparse.HelpFormatter, max_help_position=30, width=width)
        super().__init__(prog=prog, description=description, allow_abbrev=False, formatter_class=layout, **options)
        self.known: list[str] = []  # options, for suggestions

    def add_argument(self, *names: str, **options: Any) -> Any:
        if hasattr(self, "known"):  # argparse itself adds --help before
            self.known += [name.removeprefix("--") for name in names if name.startswith("--")]
        return super().add_argument(*names, **_with_converter(names[-1], options))

    def parse(self, arguments: Sequence[str]) -> Namespace:
        """The options in ``arguments``; ends the process with a line about the first that is not understood."""
        try:
            found, unknown = self.parse_known_args(arguments)
        except UsageError as error:
            self.error(str(error))
        if unknown:
            parser: Parser = getattr(found, "parser", self)  # of the subcommand
            options = [parser.suggestion(one) for one in unknown if one.startswith("-")]
            parser.error("; ".join(options) or f"unexpected argument {unknown[0]!r}; --help shows the usage")
        return found

    def suggestion(self, option: str) -> str:
        name = option.lstrip("-").partition("=")[0]
        return f"unknown option {name!r}; {nearest(name.replace('_', '-'), self.known)}"

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def add_settings(parser: Parser, *, leave_out: tuple[str, ...] = ()) -> None:
    """An option for every field of a run, in groups, and ``--config`` for a file of them."""
    parser.add_argument(
        "--config", type=Path, action="append", default=[], metavar="FILE", help="YAML file with any of these options"
    )
    for kind in _KINDS:
        add_options(parser, kind, leave_out=leave_out)


def add_options(parser: Parser, kind: Any, *, leave_out: tuple[str, ...] = (), flags: bool = False) -> None:
    """An option for every field with a help text; those that are not given are not in the result.

    ``flags``: a field that is False by default takes no value, so that what follows it is another argument.
    """
    group, types = parser.add_argument_group(), typing.get_type_hints(kind)
    for one in dataclasses.fields(kind):
        if one.name in leave_out or "help" not in one.metadata:
            continue
        if one.metadata["group"]:
            group = parser.add_argument_group(one.metadata["group"])
        flag, text = f"--{one.name.replace('_', '-')}", f"{one.metadata['help']}{_default(one.default)}"
        options = {"type": types[one.name], "default": argparse.SUPPRESS, "help": text}
        if flags and one.default is False:
            options = {"action": "store_true", "default": argparse.SUPPRESS, "help": one.metadata["help"]}
        parser.known.append(flag.removeprefix("--"))
        group.add_argument(flag, **_with_converter(flag, options))


def settings_from(options: Namespace) -> tuple[TrainConfig, RunEnvironment]:
    """The settings of the config files, later ones winning, and of the options, which win over files."""
    known = (*names_of(TrainConfig), *names_of(RunEnvironment))
    given: dict[str, Any] = {}
    for file in options.config:
        content = _read(file)
        check_names(content, known)
        given |= content
    given |= {name: value for name, value in vars(options).items() if name in known}
    config, environment = ({name: given[name] for name in names_of(kind) if name in given} for kind in _KINDS)
    return TrainConfig(**config), RunEnvironment(**environment)


_KINDS: tuple[Any, Any] = (TrainConfig, RunEnvironment)


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ValueError(f"--config {file} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"--config {file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {file} must contain names and values, such as `epochs: 3`")
    return content


def _with_converter(flag: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of `add_argument` with a type hint turned into what argparse takes."""
    hint = options.get("type")
    if hint is None:
        return options
    if hint is bool:
        options = {"nargs": "?", "const": True, **options}
    return {"metavar": _metavar(flag, hint), **options, "type": partial(_converted, flag, hint)}


def _converted(flag: str, hint: Any, text: str) -> Any:
    """The text of a value as the type of its setting."""
    with suppress(ValueError, yaml.YAMLError):  # what is no YAML of that type may be meant as text
        return convert(flag, yaml.safe_load(text), hint)
    try:
        return convert(flag, text, hint)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _metavar(flag: str, hint: Any) -> str:
    kinds = [kind for kind in alternatives(hint) if kind is not type(None)]
    if values := choices(hint):
        return f"{{{','.join([*map(str, values), *(['true', 'false'] if bool in kinds else [])])}}}"
    if not flag.startswith("-"):
        return flag
    words = {int: "N", float: "X", bool: "true|false", Path: "PATH", str: "NAME"}
    return words.get(kinds[0], "[X,…]")


def _default(value: Any) -> str:
    if value is None or value == () or value is dataclasses.MISSING:
        return ""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
    return f" (default: {text})"
