"""Which steps compute a new perturbation, which reuse the last one, and which are plain steps of the base optimizer."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from sparsesam.masks.refresh import is_whole_number

OffSteps = Literal["skip", "reuse"]


class StepKind(enum.Enum):
    ASCEND = enum.auto()  # two passes
    REUSE = enum.auto()  # one pass, at w + the last e
    PLAIN = enum.auto()  # one pass, at w


@dataclass(frozen=True)
class AscentSchedule:
    """Ascend in every ``every``-th step from ``start`` on; steps are counted from 0."""

    every: int = 1
    off_steps: OffSteps = "skip"
    start: int = 0

    def __post_init__(self) -> None:
        if not is_whole_number(self.every) or self.every < 1:
            raise ValueError(f"every must be a whole number of at least 1, got {self.every}; 1 perturbs in every step")
        if not is_whole_number(self.start) or self.start < 0:
            raise ValueError(
                f"start must be a whole number of at least 0, got {self.start}; it is the first step that ascends"
            )
        if self.off_steps not in ("skip", "reuse"):
            raise ValueError(f'off_steps must be "skip" or "reuse", got {self.off_steps!r}')

    def kind(self, step: int, *, has_last: bool) -> StepKind:
        if step < self.start:
            return StepKind.PLAIN
        if (step - self.start) % self.every == 0:
            return StepKind.ASCEND
        if self.off_steps == "skip":
            return StepKind.PLAIN
        return StepKind.REUSE if has_last else StepKind.ASCEND  # after a resume the last perturbation is gone
