"""Settings as fields of dataclasses: their help texts and types; values from YAML and the command line are checked."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from sparsesam.lab.names import suggestion


class Range(NamedTuple):
    """Which numbers a setting takes."""

    words: str
    holds: Callable[[Any], bool]


_AT_LEAST_0, _AT_LEAST_1 = Range("at least 0", lambda value: value >= 0), Range("at least 1", lambda value: value >= 1)
PositiveInt = Annotated[int, _AT_LEAST_1]
NonNegativeInt = Annotated[int, _AT_LEAST_0]
NonNegativeFloat = Annotated[float, _AT_LEAST_0]
PositiveFloat = Annotated[float, Range("greater than 0", lambda value: value > 0)]
Fraction = Annotated[float, Range("in [0, 1]", lambda value: 0 <= value <= 1)]
FractionBelow1 = Annotated[float, Range("in [0, 1)", lambda value: 0 <= value < 1)]
FractionAbove0 = Annotated[float, Range("in (0, 1]", lambda value: 0 < value <= 1)]


def option(default: Any, text: str, *, group: str | None = None) -> Any:
    """A field with its help text. ``group`` is the heading in ``--help`` for this field and those after it."""
    return field(default=default, metadata={"help": text, "group": group})


@cache
def types_of(kind: Any) -> dict[str, Any]:
    """The type of every field of a dataclass, with its range."""
    return typing.get_type_hints(kind, include_extras=True)


def check_settings(settings: Any) -> None:
    """For a frozen dataclass's ``__post_init__``: every field takes its type, or is refused."""
    for name, hint in types_of(settings.__class__).items():
        object.__setattr__(settings, name, convert(name, getattr(settings, name), hint))


def convert(name: str, value: Any, hint: Any) -> Any:
    """``value`` converted to the type ``hint``, or a ValueError.

    1 becomes 1.0, and "1e-3", which YAML reads as text, 0.001, so that equal settings have equal hashes.
    """
    for one in alternatives(hint):
        kind, *ranges = typing.get_args(one) if typing.get_origin(one) is Annotated else (one,)
        found = _as(value, kind)
        if found is _UNFIT:
            continue
        if ranges and not ranges[0].holds(found):
            null = ", or null" if type(None) in alternatives(hint) else ""
            raise ValueError(f"{name} must be {ranges[0].words}{null}, got {value}")
        return found
    *words, last = (_word(one) for one in alternatives(hint))
    meant = suggestion(str(value), [one for one in choices(hint) if isinstance(one, str)])
    raise ValueError(f"{name} must be {', '.join(words)}{' or ' if words else ''}{last}, got {value!r}{meant}")


_UNFIT = object()
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "null",
    Path: "a path",
}


def _as(value: Any, kind: Any) -> Any:
    if typing.get_origin(kind) is typing.Literal:
        return value if value in typing.get_args(kind) and not isinstance(value, bool) else _UNFIT
    if typing.get_origin(kind) is tuple:
        return _as_tuple(value, typing.get_args(kind))
    if kind is Path and isinstance(value, str | Path):
        return Path(value).expanduser()
    if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            return _UNFIT
    return value if type(value) is kind else _UNFIT


def _as_tuple(value: Any, kinds: tuple[Any, ...]) -> Any:
    if not isinstance(value, list | tuple):
        return _UNFIT
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    if len(value) != len(kinds):
        return _UNFIT
    found = tuple(_as(one, kind) for one, kind in zip(value, kinds, strict=True))
    return _UNFIT if _UNFIT in found else found


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def choices(hint: Any) -> list[Any]:
    """The values of the Literals in a type."""
    literals = [one for one in alternatives(hint) if typing.get_origin(one) is typing.Literal]
    return [value for one in literals for value in typing.get_args(one)]


def _word(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        values = [repr(value) for value in typing.get_args(kind)]
        return f"one of {', '.join(values)}" if len(values) > 1 else values[0]
    if typing.get_origin(kind) is tuple:
        kinds = typing.get_args(kind)
        return "a list of numbers" if kinds[-1] is Ellipsis else f"a list of {len(kinds)} numbers"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))
