"""Schedules of rho: each returns a factor on a parameter group's initial rho."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from sparsesam.utils.checks import check_count, is_within


class RhoSchedule(Protocol):
    """A function of the step 1, 2, 3, … that returns a factor on the initial rho."""

    def __call__(self, step: int) -> float: ...


@dataclass(frozen=True)
class Warmup:
    """rho_t = rho * min(1, t / steps): a linear warm-up.

    Args:
        steps: the number of optimizer steps of the warm-up.

    Examples:
        >>> opt = sparsesam.SAM(base, model, rho=0.1, rho_schedule=sparsesam.Warmup(500))
    """

    steps: int

    def __post_init__(self) -> None:
        check_count("steps", self.steps, "give the number of optimizer steps")

    def __call__(self, step: int) -> float:
        return min(1.0, step / self.steps)


@dataclass(frozen=True)
class Cosine:
    """rho_t falls from rho to final * rho along half a cosine, and stays there.

    Args:
        steps: the number of optimizer steps of the decay.
        final: the share of rho that is left at the end.
    """

    steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        check_count("steps", self.steps, "give the number of optimizer steps")
        if not is_within(self.final, 0, math.inf):
            raise ValueError(f"final must be at least 0, got {self.final}; it is the share of rho left at the end")

    def __call__(self, step: int) -> float:
        progress = min(1.0, (step - 1) / self.steps)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class InverseSqrt:
    """rho_t = rho / sqrt(t), as in theorems 1 and 2 of the paper."""

    def __call__(self, step: int) -> float:
        return 1 / math.sqrt(step)
