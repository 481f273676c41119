"""Finite numbers, from whatever a file may hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Number = float | None


def number(value: Any) -> Number:
    """None for what is no number, and for NaN and infinity, which neither JSON nor an axis knows."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond all floats
        return None


def numbers(values: Sequence[Any]) -> list[Number]:
    return [number(value) for value in values]
