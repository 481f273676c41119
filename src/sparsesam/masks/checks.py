"""Checks that many classes share."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real


def check_choice(argument: str, value: object, allowed: Iterable[str]) -> None:
    """Raise ValueError unless the value is one of those allowed."""
    known = tuple(allowed)
    if value not in known:
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, known))}, got {value!r}")


def check_count(argument: str, value: object, remedy: str, *, least: int = 1) -> None:
    """Raise ValueError unless the value is a whole number, Python's or NumPy's, that is large enough."""
    if not isinstance(value, Integral) or value < least:
        raise ValueError(f"{argument} must be a whole number of at least {least}, got {value}; {remedy}")


def is_within(value: object, low: float, high: float) -> bool:
    """Whether the value is a number in [low, high]."""
    return isinstance(value, Real) and low <= float(value) <= high


class NonFiniteScoreError(ValueError):
    """A score contains NaN or infinity: the optimizer keeps the previous mask and counts the event."""
