"""Models and data sets of the user's own, named ``module:function``."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any


def find_function(setting: str, name: str) -> Callable[..., Any]:
    """The function that ``setting``, "model" or "dataset", names."""
    try:
        function = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{setting} must be an importable module:function, got {name!r}: {error}; "
            "PYTHONPATH=. makes the modules of the working directory importable"
        ) from error
    if not callable(function):
        raise ValueError(f"{setting} {name} must be a function, got {type(function).__name__}")
    found: Callable[..., Any] = function
    return found


def call(setting: str, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The function's result; what it raises becomes a ValueError of one line, with the original as its cause."""
    try:
        return function(*args, **options)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{setting} {name} raised {type(error).__name__}: {reason}") from error
