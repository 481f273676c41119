"""Patterns: which sets of weights may be perturbed together.

A pattern turns scores into a mask (SSAM-F), and drops and grows a part of a mask (SSAM-D). It uses only names, shapes
and scores, not data or modules.
"""

from __future__ import annotations

import re
from typing import cast, get_args

from sparsesam.masks.patterns.base import Pattern, PerLayer, Unstructured
from sparsesam.masks.patterns.n_of_m import NM, GroupAxis
from sparsesam.masks.patterns.structured import Structured
from sparsesam.masks.select import Unit
from sparsesam.utils.checks import nearest

__all__ = ["NM", "Pattern", "PerLayer", "Structured", "Unstructured", "as_pattern"]


def as_pattern(value: Pattern | str) -> Pattern:
    """Returns the pattern of a given name.

    Names are "unstructured", "tensor", "filter", "column", "tensor reach" (the same for all three: units are added
    until the budget is reached), and "2:4", "2:4 input", "2:4 filters" for any n:m.
    """
    if isinstance(value, Pattern):
        return value
    named: dict[str, Pattern] = {"unstructured": Unstructured()}
    for unit in get_args(Unit):
        named |= {unit: Structured(unit), f"{unit} reach": Structured(unit, "reach")}
    words = " ".join(str(value).lower().split())
    if words in named:
        return named[words]
    if match := re.fullmatch(r"(\d+):(\d+)(?: (output|input|filters))?", words):
        return NM(int(match[1]), int(match[2]), axis=cast(GroupAxis, match[3] or "output"))
    known = (*named, "2:4", "2:4 input", "2:4 filters")
    raise ValueError(
        f"pattern must be a Pattern or one of {', '.join(map(repr, known))}, with any n:m for 2:4, got {value!r}; "
        f"{nearest(words, known)}"
    )
