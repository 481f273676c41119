"""Reads numbers from untrusted values and formats them for readers: 1,234, 0.5, 97.8 ± 0.4 %."""

from __future__ import annotations

import math
from collections.abc import Iterable
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


def numbers(values: Iterable[Any]) -> list[Number]:
    return [number(value) for value in values]


def significant(value: Number, digits: int = 3) -> str:
    """Format with ``digits`` significant digits, no trailing zeros; whole numbers in full with thousands separators."""
    if (value := number(value)) is None:
        return MISSING
    if value.is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -4 or exponent > 8:
        mantissa, power = f"{value:.{digits - 1}e}".split("e")
        return f"{_trimmed(mantissa)}e{int(power)}"
    return _trimmed(f"{value:,.{max(0, digits - 1 - exponent)}f}")


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


def _trimmed(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text
