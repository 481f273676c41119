"""What the masks mean for a pass, and what the first pass leaves to the second."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from sparsesam.ascent.layers import WeightGradient
from sparsesam.ascent.memo import Memo

_serial = itertools.count()


@dataclass(frozen=True)
class Plan:
    """What the masks mean for each parameter, by identity."""

    names: Mapping[int, str]
    #: parameters that move in the ascent, and how their gradient may be had for less (None: the plain way)
    perturbed: Mapping[int, WeightGradient | None]
    #: parameters that do not; with the implicit form, those through which no gradient passes
    still: frozenset[int]
    blocking: frozenset[int]
    #: normalization statistics: put back after the second pass, so that a skipped update is the right one
    statistics: frozenset[int]
    #: where the values of all its tensors are, and of those that move
    memory: frozenset[int | None]
    moved_memory: frozenset[int | None]


@dataclass
class Recording:
    """What the first pass leaves to the second."""

    memo: Memo
    token: int = field(default_factory=lambda: next(_serial))
    outside: list[Tensor] = field(default_factory=list)
    unusable: str | None = None
    needs_values: bool = False  # a light memo does not do for this model
    dirty_calls: int = 0
    reused: set[str] = field(default_factory=set)
    #: parameters that the calls of `LAYERS` really dealt with
    dealt_with: set[int] = field(default_factory=set)
    forwards: int = 0

    def let_go(self) -> None:
        """Free the activations; what is left is for the report."""
        self.memo, self.outside = Memo(), []
