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
    BEGUN = enum.auto()  # the first pass runs, or has run
    PERTURBED = enum.auto()  # weights are at w + e
    READY = enum.auto()  # weights are back, the gradient is that at w + e


@dataclass
class Step:
    """``params`` take part in the ascent, under ``masks`` (None: all of it). ``first`` tells what the first pass left
    out; None: nothing.
    """

    kind: StepKind
    params: list[PerturbedParam]
    masks: dict[str, PackedMask | None]
    phase: Phase = Phase.BEGUN
    first: FirstPass | None = None
    ascent_failed: bool = False
    directions: dict[str, Tensor] = field(default_factory=dict)

    @property
    def has_every_gradient(self) -> bool:
        return self.first is None or self.first.is_complete
