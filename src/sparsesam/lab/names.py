"""Suggestions for misspelled names, and lookup of the user's own functions, ``module:function``."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any, TypeVar, cast

T = TypeVar("T")


def nearest(name: str, known: Iterable[str], *, otherwise: str = "--help lists all") -> str:
    """Returns "did you mean …?" with the most similar names, or ``otherwise`` if none is similar.

    Names are similar if few letters differ (``optimiser``), if one is a prefix of the other (``clip-grad`` and
    ``clip-grad-norm``), or if one is the initials of the other (``learning-rate`` and ``lr``).
    """
    scores = {one: _similarity(name.lower().replace("_", "-"), one.lower().replace("_", "-")) for one in known}
    best = max(scores.values(), default=0.0)
    found = sorted((one for one in scores if scores[one] >= max(0.65, best - 0.08)), key=lambda one: -scores[one])
    return f"did you mean {' or '.join(found[:3])}?" if found else otherwise


def _similarity(name: str, known: str) -> float:
    ratio = SequenceMatcher(None, name, known).ratio()
    for short, long in ((name, known), (known, name)):
        if "-" in long and short == "".join(word[:1] for word in long.split("-")):
            return max(ratio, 0.95)
    begin_alike = known.startswith(name) or (name.startswith(known) and len(known) > 2)
    return max(ratio, 0.85) if begin_alike else ratio


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns text to append to a message: the most similar names, or nothing."""
    meant = nearest(name, known, otherwise="")
    return meant and f"; {meant}"


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError for a setting that does not exist."""
    for name in given:
        if name not in known:
            raise ValueError(f"unknown option {name!r}; {nearest(name, known)}")


def look_up(setting: str, name: str, known: Mapping[str, T], *, others: str) -> T:
    """Returns ``known[name]``, ignoring case and hyphen versus underscore; ``others`` names further accepted values."""
    key = name.lower().replace("_", "-")
    if key not in known:
        values = f"{', '.join(known)}, {others} or a module:function"
        raise ValueError(f"{setting} must be one of {values}, got {name!r}; {nearest(key, known)}")
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
