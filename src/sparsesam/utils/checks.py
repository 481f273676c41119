"""Argument checks shared by many classes."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real

import torch
from torch import Tensor


def check_choice(argument: str, value: object, allowed: Iterable[str]) -> None:
    """Raise ValueError unless the value is one of the allowed strings."""
    known = tuple(allowed)
    if value not in known:
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, known))}, got {value!r}")


def check_count(argument: str, value: object, remedy: str, *, least: int = 1) -> None:
    """Raise ValueError unless the value is an integer (of Python or NumPy) of at least ``least``."""
    if not isinstance(value, Integral) or value < least:
        raise ValueError(f"{argument} must be an integer of at least {least}, got {value}; {remedy}")


def is_within(value: object, low: float, high: float) -> bool:
    """Whether the value is a number in [low, high]."""
    return isinstance(value, Real) and low <= float(value) <= high


def check_number(argument: str, value: object, remedy: str, *, least: float = 0.0, most: float = math.inf) -> None:
    """Raise ValueError unless the value is a finite number in [least, most]."""
    if not is_within(value, least, most) or value == math.inf:
        rule = f"a finite number of at least {least:g}" if most == math.inf else f"in [{least:g}, {most:g}]"
        raise ValueError(f"{argument} must be {rule}, got {value}; {remedy}")


def check_like_parameters(
    argument: str, given: Mapping[str, Tensor], parameters: Mapping[str, Tensor], what: str = "parameter"
) -> None:
    """Raise ValueError for a tensor that has no parameter of the same name and shape."""
    for name, tensor in given.items():
        if name not in parameters:
            raise ValueError(f"{argument} has {name!r}, which is not a {what}; {nearest(name, parameters)}")
        if tensor.shape != parameters[name].shape:
            raise ValueError(
                f"{argument}[{name!r}] must have the parameter's shape {tuple(parameters[name].shape)}, "
                f"got {tuple(tensor.shape)}"
            )


def check_bool(argument: str, masks: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a mask that is not a bool tensor."""
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise ValueError(f"{argument}[{name!r}] must be a bool tensor, got {mask.dtype}; use mask.bool()")


def nearest(name: str, known: Iterable[str], *, otherwise: str | None = None) -> str:
    """Returns "did you mean …?" with the most similar names; if none is similar, ``otherwise`` or some names."""

    def plain(text: str) -> str:
        return text.lower().replace("_", "-")

    scores = {text: difflib.SequenceMatcher(None, plain(name), plain(text)).ratio() for text in known}
    order = sorted(scores, key=lambda candidate: -scores[candidate])
    found = [candidate for candidate in order[:3] if scores[candidate] >= max(0.65, scores[order[0]] - 0.08)]
    if found:
        return f"did you mean {' or '.join(found)}?"
    return f"known are {', '.join(order[:3])}{', …' if len(order) > 3 else ''}" if otherwise is None else otherwise


class NonFiniteScoreError(ValueError):
    """Raised for scores with NaN or infinity; the optimizer then keeps the previous mask and counts the event."""
