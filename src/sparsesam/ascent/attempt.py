"""A pass with the engine's help, and what speaks against its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sparsesam.ascent.memo import EngineFallbackError
from sparsesam.ascent.stand_in import ValueGoneError


class Failure(NamedTuple):
    """Why a pass must be run again without help. It keeps no traceback: that would keep the pass's activations."""

    reason: str
    value_gone: bool = False
    is_foreign: bool = False  # an error that is not the engine's own: perhaps the closure's


def attempt(run: Callable[[], Any], missed_a_value: Callable[[], bool]) -> tuple[Any, Failure | None]:
    """The pass's result, and whether it failed: by an error, one that the closure caught, or a value it missed."""
    fallbacks = EngineFallbackError.made
    try:
        with torch.enable_grad():
            result = run()
    except Exception as error:
        gone = isinstance(error, ValueGoneError)
        foreign = not gone and not isinstance(error, EngineFallbackError)
        return None, Failure(str(error) or type(error).__name__, gone, foreign)
    if missed_a_value():
        return None, Failure("it looks at a value that the first pass had no use for", value_gone=True)
    if EngineFallbackError.made > fallbacks:
        return None, Failure("the closure caught an error of the engine")
    return result, None
