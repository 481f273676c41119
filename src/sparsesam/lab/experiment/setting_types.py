"""Settings as fields of dataclasses: their help texts and types; values from YAML and the command line are checked."""

from __future__ import annotations

import types
import typing
from dataclasses import field
from pathlib import Path
from typing import Any

from sparsesam.lab.names import suggestion


def option(default: Any, text: str, *, group: str | None = None) -> Any:
    """A field with its help text. ``group`` is the heading in ``--help`` for this field and those after it."""
    return field(default=default, metadata={"help": text, "group": group})


def fitted(name: str, value: Any, hint: Any) -> Any:
    """``value`` converted to the type ``hint``, or a ValueError.

    1 becomes 1.0, and "1e-3", which YAML reads as text, 0.001, so that equal settings have equal hashes.
    """
    for one in alternatives(hint):
        found = _as(value, one)
        if found is not _UNFIT:
            return found
    choices = [one for kind in alternatives(hint) if typing.get_origin(kind) is typing.Literal for one in kind.__args__]
    meant = suggestion(str(value), [one for one in choices if isinstance(one, str)])
    raise ValueError(f"{name} must be {in_words(hint)}, got {value!r}{meant}")


def in_words(hint: Any) -> str:
    """A type as a sentence has it: "an int, or null"."""
    words = [_word(one) for one in alternatives(hint)]
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


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


def _word(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        choices = [repr(choice) for choice in typing.get_args(kind)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if typing.get_origin(kind) is tuple:
        kinds = typing.get_args(kind)
        return "a list of numbers" if kinds[-1] is Ellipsis else f"a list of {len(kinds)} numbers"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))
