"""What things are called on the page."""

from __future__ import annotations

from typing import Any

OPTIMIZERS = {
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "sam": "SAM",
    "asam": "ASAM",
    "ssam-f": "SSAM-F",
    "ssam-d": "SSAM-D",
    "ssam-random": "SSAM, random mask",
}


def optimizer_name(optimizer: str) -> str:
    return OPTIMIZERS.get(optimizer, optimizer)


def color_of(optimizer: str) -> str:
    return optimizer if optimizer in OPTIMIZERS else "other"


def setting_name(name: str, value: Any) -> str:
    return f"{name.replace('_', ' ')} {show(value)}"


def show(value: Any) -> str:
    """A setting's value in few characters."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def decimals(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def significant(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}g}"


def percent(value: float | None, spread: float | None = None) -> str:
    """A share, with its standard deviation if there is one."""
    if value is None:
        return "–"
    return f"{100 * value:.2f}" + ("" if spread is None else f" ± {100 * spread:.2f}") + " %"


def plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
