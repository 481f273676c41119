"""One step: what belongs to it, from its first pass to the base optimizer's update."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from torch import Tensor

from sparsesam.ascent.first_pass import FirstPass
from sparsesam.ascent_schedule import StepKind
from sparsesam.masks.packed import PackedMask
from sparsesam.parameters import PerturbedParam


class Phase(enum.Enum):
    FIRST = enum.auto()  # the first pass runs
    BETWEEN = enum.auto()  # its gradients are there
    PERTURBED = enum.auto()  # weights are at w + e
    READY = enum.auto()  # weights are back, the gradient is that at w + e


@dataclass
class Step:
    """``params`` take part in the ascent, under ``masks`` (None: all of it).

    ``first`` tells what the first pass left out, the last of its blocks if it has several; None: nothing.
    ``has_every_gradient``: no block of it left out a gradient.
    """

    kind: StepKind
    params: list[PerturbedParam]
    masks: dict[str, PackedMask | None]
    phase: Phase = Phase.FIRST
    first: FirstPass | None = None
    has_every_gradient: bool = True
    ascent_failed: bool = False
    directions: dict[str, Tensor] = field(default_factory=dict)

    def passed(self, first: FirstPass | None) -> None:
        """A block of the first pass is over."""
        self.first = first
        self.has_every_gradient &= first is None or first.is_complete
