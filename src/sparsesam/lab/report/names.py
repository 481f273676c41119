"""What optimizers and settings are called on the page."""

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
    "sam-on": "SAM-ON",
    "ssam-g": "SSAM, largest gradients",
    "ssam-random": "SSAM, random mask",
    "auto": "recommended",
}


def optimizer_name(optimizer: str) -> str:
    return OPTIMIZERS.get(optimizer, optimizer)


def setting_name(name: str, value: Any) -> str:
    return f"{name.replace('_', ' ')} {show_setting(value)}"


def show_setting(value: Any) -> str:
    """A setting's value in few characters."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(show_setting, value))
    return str(value)
