"""The types of settings, wherever they come from: a YAML file says less about types than the command line."""

from __future__ import annotations

import types
import typing
from typing import Any


def fitted(name: str, value: Any, hint: Any) -> Any:
    """``value`` as ``hint`` wants it: 1 becomes 1.0, and "1e-3", which YAML takes for text, 0.001; or a ValueError.

    Equal settings so have equal hashes, however they were written.
    """
    for one in _alternatives(hint):
        found = _as(value, one)
        if found is not _UNFIT:
            return found
    raise ValueError(f"{name} must be {describe(hint)}, got {value!r}")


def describe(hint: Any) -> str:
    """A type as a sentence has it: "an int, or null"."""
    words = [_word(one) for one in _alternatives(hint)]
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


_UNFIT = object()
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}


def _as(value: Any, kind: Any) -> Any:
    if typing.get_origin(kind) is typing.Literal:
        return value if value in typing.get_args(kind) and not isinstance(value, bool) else _UNFIT
    if typing.get_origin(kind) is tuple:
        return _as_tuple(value, typing.get_args(kind))
    if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            return _UNFIT
    return value if type(value) is kind else _UNFIT


def _as_tuple(value: Any, kinds: tuple[Any, ...]) -> Any:
    if not isinstance(value, list | tuple) or len(value) != len(kinds):
        return _UNFIT
    found = tuple(_as(one, kind) for one, kind in zip(value, kinds, strict=True))
    return _UNFIT if _UNFIT in found else found


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _word(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        choices = [repr(choice) for choice in typing.get_args(kind)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if typing.get_origin(kind) is tuple:
        return f"a list of {len(typing.get_args(kind))} numbers"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))
