"""The argument parser of the command line: argparse with options generated from dataclasses.

Values from the command line and from YAML are converted and checked by `sparsesam.lab.experiment.setting_types`. Not
jsonargparse: it starts 0.1 to 0.2 s slower, and ranges, grouped help, names and suggestions would still be our code.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from sparsesam.lab.experiment.config import DEFAULTS, RunEnvironment, TrainConfig, check_used, split_settings
from sparsesam.lab.experiment.setting_types import alternatives, as_mapping, choices, convert, read_yaml
from sparsesam.lab.names import unknown_name

__all__ = ["Namespace", "Parser", "add_options", "add_settings", "given_options", "settings_from"]


class Parser(ArgumentParser):
    """argparse with any type hint as ``type``, one-line errors, and suggestions for unknown options."""

    def __init__(self, prog: str, description: str | None, **options: Any) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, **options)

    def add_argument(self, *names: str, group: Any = None, **options: Any) -> Any:
        hint = options.get("type")
        if hint is not None:
            usual = {"metavar": metavar(names[-1], hint), **({"nargs": "?", "const": True} if hint is bool else {})}
            options = {**usual, **options, "type": partial(self._convert, names[-1], hint)}
        options["help"] = options.get("help", "").replace("%", "%%")
        target: Any = group or super()
        return target.add_argument(*names, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Reject unknown arguments, also in the parser of a subcommand."""
        found, unknown = super().parse_known_args(args, namespace)
        known = [name.removeprefix("--") for name in self._option_string_actions]
        names = [word.lstrip("-").partition("=")[0] for word in unknown if word.startswith("-")]
        if names:
            self.error("; ".join(unknown_name("option", name, known) for name in names))
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}; --help shows the usage")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def _convert(self, flag: str, hint: Any, text: str) -> Any:
        """Convert the text of a value to the type of its setting."""
        value = text
        with suppress(ValueError):
            value = read_yaml(text)
        try:
            return convert(flag, value, hint)
        except ValueError as error:
            with suppress(ValueError):  # a value that YAML reads as another type may be meant as text
                return convert(flag, text, hint)
            self.error(str(error))


def add_settings(parser: Parser, *, leave_out: Sequence[str] = ()) -> None:
    """Add an option for every setting of a run, in groups, and ``--config`` for a file of settings."""
    text = "YAML file with any of these options"
    parser.add_argument("--config", type=Path, action="append", default=[], metavar="FILE", help=text)
    add_options(parser, TrainConfig, leave_out=leave_out)
    add_options(parser, RunEnvironment, leave_out=leave_out)


def add_options(parser: Parser, kind: Any, *, leave_out: Sequence[str] = (), flags: bool = False) -> None:
    """Add an option for every field with a help text; options that are not given are absent from the result.

    ``flags``: options that are False by default take no value, so the next word is another argument.
    """
    group, types = parser.add_argument_group(), typing.get_type_hints(kind)
    for setting in dataclasses.fields(kind):
        if setting.name in leave_out or "help" not in setting.metadata:
            continue
        if setting.metadata["group"] is not None:
            group = parser.add_argument_group(setting.metadata["group"])
        is_flag = flags and setting.default is False
        text = setting.metadata["help"] + ("" if is_flag else default_text(setting.default))
        how: dict[str, Any] = {"action": "store_true"} if is_flag else {"type": types[setting.name]}
        flag = f"--{setting.name.replace('_', '-')}"
        parser.add_argument(flag, group=group, default=argparse.SUPPRESS, help=text, **how)


def given_options(options: Namespace, *kinds: Any) -> dict[str, Any]:
    """Returns the options that were given, of those that `add_options` has added for these dataclasses."""
    names = {setting.name for kind in kinds for setting in dataclasses.fields(kind)}
    return {name: value for name, value in vars(options).items() if name in names}


def settings_from(options: Namespace, saved: Mapping[str, Any] | None = None) -> tuple[TrainConfig, RunEnvironment]:
    """Combine settings: options override config files, later files earlier ones, and all of them those of a run.

    ValueError for an option, or a value of a file that is not the default, that the run would not use.
    """
    in_files: dict[str, Any] = {}
    for file in options.config:
        try:
            in_files |= as_mapping("the file", read_yaml(file.read_text()))
        except (OSError, ValueError) as error:
            raise ValueError(f"--config {file} cannot be read: {error}") from error
    in_files.pop("sum", None)  # of a run's config.yaml
    chosen = given_options(options, TrainConfig, RunEnvironment)
    config, environment = split_settings({**(saved or {}), **in_files, **chosen})
    check_used(config, [*chosen, *(name for name in in_files if getattr(config, name, None) != DEFAULTS.get(name))])
    return config, environment


def metavar(flag: str, hint: Any) -> str:
    """Returns the values of a type, for help texts."""
    kinds = [getattr(kind, "__origin__", kind) for kind in alternatives(hint) if kind is not type(None)]
    if values := choices(hint):
        return f"{{{','.join([*map(str, values), *(['true', 'false'] if bool in kinds else [])])}}}"
    if not flag.startswith("-"):
        return flag
    words = {int: "N", float: "X", bool: "true|false", Path: "PATH", str: "NAME"}
    return words.get(kinds[0], "NAME,…" if "str" in str(hint) else "[X,…]")


def default_text(value: Any) -> str:
    if value is None or value == () or value is dataclasses.MISSING:
        return ""
    return f" (default: {str(value).lower() if isinstance(value, bool) else value})"
