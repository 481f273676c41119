"""Which steps ascend anew, which use the last perturbation again, and which are the base optimizer's."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

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
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}; 1 perturbs in every step")
        if self.start < 0:
            raise ValueError(f"start must be at least 0, got {self.start}; it is the first step with a perturbation")
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
