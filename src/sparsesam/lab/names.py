"""Lookup of names with suggestions, and of the user's own functions, ``module:function``."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from sparsesam.utils.checks import nearest

T = TypeVar("T")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns text to append to a message: the most similar names, or nothing."""
    meant = nearest(name, known, otherwise="")
    return meant and f"; {meant}"


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Returns the message for an unknown option, command or analysis."""
    return f"unknown {kind} {name!r}; {nearest(name, known, otherwise='--help lists all')}"


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError for a setting that does not exist."""
    for name in map(str, given):
        if name not in known:
            raise ValueError(unknown_name("option", name, known))


def look_up(setting: str, name: str, known: Mapping[str, T], *, others: str) -> T:
    """Returns ``known[name]``, ignoring case and hyphen versus underscore; ``others`` names further accepted values."""
    key = name.lower().replace("_", "-")
    if key not in known:
        values = f"{', '.join(known)}, {others} or a module:function"
        raise ValueError(f"{setting} must be one of {values}, got {name!r}{suggestion(key, known)}")
    return known[key]


def accepted(function: Callable[..., Any], options: Mapping[str, T]) -> dict[str, T]:
    """Returns the options that the function has parameters for."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in parameters}


def find_function(setting: str, name: str) -> Callable[..., Any]:
    """Import the function ``name``, "module:function", which is the value of ``setting`` ("model" or "dataset")."""
    try:
        function = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{setting} must be an importable module:function, got {name!r}: {error}; "
            "PYTHONPATH=. makes the modules of the working directory importable"
        ) from error
    if not callable(function):
        raise ValueError(f"{setting} {name} must be a function, got {type(function).__name__}")
    return cast(Callable[..., Any], function)


def call_function(setting: str, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call the function; its exceptions become a one-line ValueError with the original as cause."""
    try:
        return function(*args, **options)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{setting} {name} raised {type(error).__name__}: {reason}") from error
