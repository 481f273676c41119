"""Mask rules: a mask is composed of a score, a pattern and a refresh rule."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sparsesam.masks.patterns import Pattern, Unstructured
from sparsesam.masks.scores import GradientMagnitude, Score, ScoreContext
from sparsesam.utils.checks import check_count, is_within


@dataclass(frozen=True)
class Refresh:
    """When a mask is made: before the first ascent, then every ``every`` steps; ``None``: only on request."""

    every: int | None

    def __post_init__(self) -> None:
        if self.every is not None:
            check_count("every", self.every, "use manual() for no refreshes")

    def due(self, step: int, last: int) -> bool:
        """Whether step 0, 1, 2, … needs a new mask; the last one was made in step ``last``."""
        return self.every is not None and step // self.every > last // self.every


def every_steps(steps: int) -> Refresh:
    """A new mask every ``steps`` optimizer steps."""
    return Refresh(steps)


def every_epochs(epochs: int, *, steps_per_epoch: int) -> Refresh:
    """A new mask every ``epochs`` epochs, the paper's T_m.

    Args:
        epochs: the epochs between two masks.
        steps_per_epoch: the optimizer steps of an epoch, usually ``len(loader)``.
    """
    check_count("epochs", epochs, "use every_steps(k) for a part of an epoch")
    check_count("steps_per_epoch", steps_per_epoch, "it is usually len(loader)")
    return Refresh(epochs * steps_per_epoch)


def manual() -> Refresh:
    """One mask for the whole training, unless ``opt.refresh_mask()`` is called."""
    return Refresh(None)


class MaskRule(ABC):
    """Base class of all mask rules, which decide which weights are perturbed.

    A rule has no state: the optimizer and its checkpoints hold the current masks and the random generator, which is
    seeded with ``seed``.
    """

    refresh: Refresh
    seed: int
    #: whether the purpose is to save time, which norm="full" would prevent
    needs_masked_norm: ClassVar[bool] = False

    @property
    def knows_shards(self) -> bool:
        """Whether `make` supports a context with shards, and then returns this rank's part of the masks."""
        return False

    @property
    def needs_gradient(self) -> bool:
        """Whether a refresh needs the ascent gradient, and so runs after the first pass."""
        return False

    @abstractmethod
    def make(self, context: ScoreContext) -> dict[str, Tensor]:
        """Returns a bool mask for each parameter of the context."""


class _PatternRule(MaskRule):
    """A rule whose masks have a pattern."""

    pattern: Pattern
    sparsity: float | None

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, Pattern):
            raise TypeError(f'pattern must be a Pattern, such as as_pattern("2:4"), got {self.pattern!r}')
        self.pattern.check_sparsity(self.sparsity)
        if not isinstance(self.refresh, Refresh):
            raise TypeError(f"refresh must be every_steps(k), every_epochs(n, …) or manual(), got {self.refresh!r}")

    @property
    def knows_shards(self) -> bool:
        return self.pattern.knows_shards

    def make(self, context: ScoreContext) -> dict[str, Tensor]:
        if self.sparsity in (0, 1) and self.pattern.implied_sparsity is None:  # no score could change the outcome
            is_kept = self.sparsity == 0
            return {name: torch.full_like(p, is_kept, dtype=torch.bool) for name, p in context.local.items()}
        return self._make(context)

    @abstractmethod
    def _make(self, context: ScoreContext) -> dict[str, Tensor]:
        """The same as `make`, for a sparsity between 0 and 1."""


@dataclass(frozen=True, eq=False)
class Mask(_PatternRule):
    """Perturbs the weights with the largest scores; SSAM-F is ``Mask(score=Fisher(...), ...)``.

    Args:
        score: a number per weight, such as `Fisher` or `GradientMagnitude`.
        pattern: which weights may be kept together.
        sparsity: the share of weights that is not perturbed; None where the pattern implies it.
        refresh: when a new mask is made.
        seed: the seed of the score's random draws.

    Examples:
        >>> score = sparsesam.Fisher(train_set, loss_fn, samples=16)
        >>> mask = sparsesam.Mask(score, sparsesam.NM(2, 4), refresh=sparsesam.every_steps(100))
    """

    score: Score
    pattern: Pattern = field(default_factory=Unstructured)
    sparsity: float | None = None
    refresh: Refresh = field(default_factory=manual)
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.score):
            raise TypeError(f"score must be a Score, such as GradientMagnitude(), got {self.score!r}")

    @property
    def needs_gradient(self) -> bool:
        return self.score.needs_gradient

    def _make(self, context: ScoreContext) -> dict[str, Tensor]:
        return self.pattern.select(context.scores(self.score), self.sparsity, shards=context.shards)


@dataclass(frozen=True, eq=False)
class RandomMask(_PatternRule):
    """Perturbs weights drawn uniformly over the pattern's units; see `random_mask`."""

    pattern: Pattern = field(default_factory=Unstructured)
    sparsity: float | None = None
    refresh: Refresh = field(default_factory=manual)
    seed: int = 0

    def _make(self, context: ScoreContext) -> dict[str, Tensor]:
        return self.pattern.draw(context.local, context.generator, self.sparsity, shards=context.shards)


@dataclass(frozen=True, eq=False)
class DynamicMask(_PatternRule):
    """Dynamic sparse training of the mask (SSAM-D), with any scores; see `dynamic_mask`.

    The first mask is random. Each refresh drops a share

        f(t) = drop_ratio / 2 * (1 + cos(pi * t / total_steps))

    of the kept weights, those with the smallest ``drop`` score, and grows as many of all others, those with the largest
    ``growth`` score; None means at random. t counts steps, in the paper epochs; without ``total_steps`` the share is
    constant.
    """

    drop: Score | None = field(default_factory=GradientMagnitude)
    growth: Score | None = None
    pattern: Pattern = field(default_factory=Unstructured)
    sparsity: float | None = None
    drop_ratio: float = 0.5
    total_steps: int | None = None
    refresh: Refresh = field(default_factory=manual)
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_within(self.drop_ratio, 0, 1):
            raise ValueError(
                f"drop_ratio must be in [0, 1], got {self.drop_ratio}; it is the share of kept weights dropped"
            )
        if self.total_steps is not None:
            check_count("total_steps", self.total_steps, "give epochs * len(loader)")

    @property
    def needs_gradient(self) -> bool:
        return any(score is not None and score.needs_gradient for score in (self.drop, self.growth))

    def ratio(self, step: int) -> float:
        if self.total_steps is None:
            return self.drop_ratio
        return self.drop_ratio / 2 * (1 + math.cos(math.pi * min(1.0, step / self.total_steps)))

    def _make(self, context: ScoreContext) -> dict[str, Tensor]:
        if context.previous is None:
            return self.pattern.draw(context.local, context.generator, self.sparsity, shards=context.shards)
        packed = context.previous
        masks = {  # zeros for a parameter added since the last refresh
            name: packed[name].unpack(p.device) if name in packed else torch.zeros_like(p, dtype=torch.bool)
            for name, p in context.local.items()
        }
        return self.pattern.drop_and_grow(
            masks,
            context.generator if self.drop is None else context.scores(self.drop),
            context.generator if self.growth is None else context.scores(self.growth),
            sparsity=self.sparsity,
            ratio=self.ratio(context.step),
            shards=context.shards,
        )
