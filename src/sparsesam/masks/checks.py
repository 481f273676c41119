"""Checks that many classes share."""

from __future__ import annotations

from collections.abc import Iterable


def check_choice(argument: str, value: object, allowed: Iterable[str]) -> None:
    """Raise ValueError unless the value is one of those allowed."""
    known = tuple(allowed)
    if value not in known:
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, known))}, got {value!r}")


class NonFiniteScoreError(ValueError):
    """A score contains NaN or infinity: the optimizer keeps the previous mask and counts the event."""
