"""The one description of a setting: a dataclass field with its type, default, help text and the runs that use it.

The parser, the check of YAML files, the hash of a run and docs/settings.md are made from it.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from sparsesam.lab.experiment.errors import one_line
from sparsesam.lab.names import suggestion


@dataclass(frozen=True)
class Rule:
    """The numbers that a setting accepts, or the runs that use it: in words for messages and documentation, and as a
    function of the number, or of the settings.
    """

    words: str
    holds: Callable[[Any], bool]

    def __and__(self, other: Rule) -> Rule:
        return Rule(f"{self.words} and {other.words}", lambda value: self.holds(value) and other.holds(value))


_AT_LEAST_0 = Rule("at least 0", lambda value: value >= 0)
PositiveInt = Annotated[int, Rule("at least 1", lambda value: value >= 1)]
NonNegativeInt = Annotated[int, _AT_LEAST_0]
NonNegativeFloat = Annotated[float, _AT_LEAST_0]
PositiveFloat = Annotated[float, Rule("greater than 0", lambda value: value > 0)]
Fraction = Annotated[float, Rule("in [0, 1]", lambda value: 0 <= value <= 1)]
FractionBelow1 = Annotated[float, Rule("in [0, 1)", lambda value: 0 <= value < 1)]
FractionAbove0 = Annotated[float, Rule("in (0, 1]", lambda value: 0 < value <= 1)]


def when(name: str, *values: Any) -> Rule:
    """Returns the condition that a setting has one of these values."""
    return Rule(f"{name} {' or '.join(map(str, values))}", lambda settings: getattr(settings, name) in values)


def option(default: Any, text: str, used: Rule | None = None, *, group: str | None = None) -> Any:
    """Returns a dataclass field with a help text. ``group`` starts a new heading in ``--help`` at this field."""
    return field(default=default, metadata={"help": text, "group": group, "used": used})


@cache
def _types_of(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def check_settings(settings: Any) -> None:
    """Convert every field of a frozen dataclass to its type or raise ValueError; call it in ``__post_init__``."""
    for name, hint in _types_of(settings.__class__).items():
        object.__setattr__(settings, name, convert(name, getattr(settings, name), hint))


def convert(name: str, value: Any, hint: Any) -> Any:
    """Convert ``value`` to the type ``hint`` or raise ValueError.

    For a float, 1 becomes 1.0 and "1e-3", which YAML reads as text, 0.001, so that equal settings have equal hashes.
    """
    kinds = alternatives(hint)
    for member in kinds:
        kind, *ranges = typing.get_args(member) if typing.get_origin(member) is Annotated else (member,)
        with suppress(TypeError):
            found = _convert_to(value, kind)
            if ranges and not ranges[0].holds(found):
                null = ", or null" if type(None) in kinds else ""
                raise ValueError(f"{name} must be {ranges[0].words}{null}, got {value}")
            return found
    *words, last = map(_type_in_words, kinds)
    meant = suggestion(str(value), [choice for choice in choices(hint) if isinstance(choice, str)])
    raise ValueError(f"{name} must be {', '.join(words)}{' or ' if words else ''}{last}, got {value!r}{meant}")


def _convert_to(value: Any, kind: Any) -> Any:
    """Returns ``value`` as ``kind`` or raises TypeError."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal and value in arguments and not isinstance(value, bool):
        return value
    if origin is tuple and arguments[0] is str and isinstance(value, str):
        value = [word.strip() for word in value.split(",")]
    if origin is tuple and isinstance(value, list | tuple):
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(value) == len(kinds):
            return tuple(map(_convert_to, value, kinds))
    if kind is Path and isinstance(value, str | Path):
        return Path(value).expanduser()
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            if math.isfinite(found := float(value)):
                return found
    elif type(value) is kind:
        return value
    raise TypeError


def read_yaml(text: str) -> Any:
    """Parse YAML; ValueError, in one line, for anything that cannot be parsed."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(one_line(error)) from error


def as_mapping(what: str, value: Any) -> dict[str, Any]:
    """Returns a mapping read from YAML, with names as text; ValueError for anything else."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} must contain names and values, such as `rho: 0.1`, got {value!r:.100}")
    return {str(name): entry for name, entry in value.items()}


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Returns the member types of a union, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def choices(hint: Any) -> list[Any]:
    """Returns the values of the Literals in a type."""
    literals = [kind for kind in alternatives(hint) if typing.get_origin(kind) is Literal]
    return [value for literal in literals for value in typing.get_args(literal)]


_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", Path: "a path"}


def _type_in_words(kind: Any) -> str:
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, arguments))}" if len(arguments) > 1 else repr(arguments[0])
    if typing.get_origin(kind) is tuple:
        entries = "names" if arguments[0] is str else "numbers"
        return f"a list of {entries}" if arguments[-1] is Ellipsis else f"a list of {len(arguments)} {entries}"
    return "null" if kind is type(None) else _WORDS[arguments[0] if arguments else kind]
