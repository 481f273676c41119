"""Reads numbers from untrusted values and formats them for readers: 1,234, 0.5, 97.8 ± 0.4 %."""

from __future__ import annotations

import math
from typing import Any

Number = float | None
MISSING = "–"


def number(value: Any) -> Number:
    """Returns a finite float; None for anything else, including NaN and infinity, which JSON and axes cannot show."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer too large for a float
        return None


def significant(value: Number) -> str:
    """Format with three significant digits; whole and large numbers in full, with thousands separators."""
    if (value := number(value)) is None:
        return MISSING
    is_whole = value.is_integer() and abs(value) < 1e15
    return f"{value:,.0f}" if is_whole or 999.5 <= abs(value) < 1e9 else f"{value:.3g}"


def percent(share: Number, error: Number = None) -> str:
    """Format a share in percent, with ± error if given; one decimal, two between 99 and 100 %."""
    if (share := number(share)) is None:
        return MISSING
    decimals = 2 if 0.99 <= share < 1 or (error is not None and 0 < error < 0.0005) else 1
    shown = f"{100 * share:.{decimals}f}"
    return f"{shown} %" if error is None else f"{shown} ± {100 * error:.{decimals}f} %"


def ratio(value: Number) -> str:
    """Format with two decimals, as in "1.98 x SGD"."""
    return MISSING if (value := number(value)) is None else f"{value:.2f}"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
