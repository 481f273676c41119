"""Schedules of rho: each returns a factor on a parameter group's initial rho."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch.optim import Optimizer

from sparsesam.utils.checks import check_count


class RhoSchedule(Protocol):
    """A function of the step 1, 2, 3, … that returns a factor on the initial rho."""

    def __call__(self, step: int) -> float: ...


@dataclass(frozen=True)
class Warmup:
    """rho_t = rho * min(1, t / steps): a linear warm-up over this number of optimizer steps.

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
    """rho_t falls from rho to final * rho along half a cosine, in this number of optimizer steps, and stays there."""

    steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        check_count("steps", self.steps, "give the number of optimizer steps")

    def __call__(self, step: int) -> float:
        progress = min(1.0, (step - 1) / self.steps)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class InverseSqrt:
    """rho_t = rho / sqrt(t), as in theorems 1 and 2 of the paper."""

    def __call__(self, step: int) -> float:
        return 1 / math.sqrt(step)


@dataclass(frozen=True, eq=False)
class FollowLearningRate:
    """rho_t falls with the learning rate, from rho at ``max_lr`` to final * rho at ``min_lr``, as in GSAM's paper:

        rho_t = rho * (final + (1 - final) * (lr_t - min_lr) / (max_lr - min_lr))

    The learning rate lr_t is that of the optimizer's first parameter group.
    """

    optimizer: Optimizer
    max_lr: float
    min_lr: float = 0.0
    final: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_lr < self.max_lr:
            raise ValueError(
                f"max_lr must be above min_lr={self.min_lr}, got {self.max_lr}; for a constant one, leave it out"
            )

    def __call__(self, step: int) -> float:
        rate = float(self.optimizer.param_groups[0]["lr"])
        return self.final + (1 - self.final) * max(0.0, (rate - self.min_lr) / (self.max_lr - self.min_lr))
