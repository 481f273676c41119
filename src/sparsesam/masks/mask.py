"""A mask is a score, a pattern and a refresh rule put together."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sparsesam.masks.checks import check_count, is_within
from sparsesam.masks.packed import PackedMask
from sparsesam.masks.patterns import Pattern, Unstructured
from sparsesam.masks.refresh import Refresh, manual
from sparsesam.masks.scores import GradientMagnitude, Score, ScoreContext


class MaskRule(ABC):
    """Says which weights are perturbed: the base class of all masks.

    A rule has no state: its random generator, made from ``seed``, and its current masks are in the optimizer and in its
    checkpoints.
    """

    refresh: Refresh
    seed: int
    #: whether the mask is to save time, which norm="full" would take back
    needs_masked_norm: ClassVar[bool] = False

    @property
    def knows_shards(self) -> bool:
        """Whether `make` gives this rank's part of the masks where a context has shards."""
        return False

    @property
    def needs_gradient(self) -> bool:
        """Whether a refresh looks at the ascent gradient, and so comes after the first pass."""
        return False

    @abstractmethod
    def make(self, context: ScoreContext) -> dict[str, Tensor]:
        """Boolean masks, one per parameter of the context."""


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


@dataclass(frozen=True, eq=False)
class Mask(_PatternRule):
    """Perturbs the weights with the largest scores; SSAM-F is ``Mask(score=Fisher(...), ...)``.

    Args:
        score: a number per weight, such as `Fisher` or `GradientMagnitude`.
        pattern: which weights may be kept together.
        sparsity: the share of weights that is not perturbed; None where the pattern implies it.
        refresh: when the mask is made anew.
        seed: of what the score draws at random.

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

    def make(self, context: ScoreContext) -> dict[str, Tensor]:
        trivial = _without_scores(context.local, self.sparsity, self.pattern)
        return trivial or self.pattern.select(context.scores(self.score), self.sparsity, shards=context.shards)


@dataclass(frozen=True, eq=False)
class RandomMask(_PatternRule):
    """Perturbs weights drawn uniformly over the pattern's units; see `random_mask`."""

    pattern: Pattern = field(default_factory=Unstructured)
    sparsity: float | None = None
    refresh: Refresh = field(default_factory=manual)
    seed: int = 0

    def make(self, context: ScoreContext) -> dict[str, Tensor]:
        return self.pattern.draw(context.local, context.generator, self.sparsity, shards=context.shards)


@dataclass(frozen=True, eq=False)
class DynamicMask(_PatternRule):
    """Dynamic sparse training of the mask (SSAM-D), with any scores; see `dynamic_mask`.

    The first mask is random. Each refresh drops a share

        f(t) = drop_ratio / 2 * (1 + cos(pi * t / total_steps))

    of the kept weights, those with the smallest ``drop`` score, and grows as many among all the others, those with the
    largest ``growth`` score; None means at random. t is counted in steps where the paper counts epochs; without
    ``total_steps`` the share is constant.
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

    def make(self, context: ScoreContext) -> dict[str, Tensor]:
        trivial = _without_scores(context.local, self.sparsity, self.pattern)
        if trivial:
            return trivial
        if context.previous is None:
            return self.pattern.draw(context.local, context.generator, self.sparsity, shards=context.shards)
        return self.pattern.drop_and_grow(
            _unpacked(context.previous, context.local),
            context.generator if self.drop is None else context.scores(self.drop),
            context.generator if self.growth is None else context.scores(self.growth),
            sparsity=self.sparsity,
            ratio=self.ratio(context.step),
            shards=context.shards,
        )


def _without_scores(
    parameters: Mapping[str, Tensor], sparsity: float | None, pattern: Pattern
) -> dict[str, Tensor] | None:
    """All ones or all zeros, where no score could change the outcome."""
    if sparsity not in (0, 1) or pattern.implied_sparsity is not None:
        return None
    return {name: torch.full_like(p, sparsity == 0, dtype=torch.bool) for name, p in parameters.items()}


def _unpacked(masks: Mapping[str, PackedMask], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The previous masks of the current parameters; zeros for a parameter added since."""
    return {
        name: masks[name].unpack(parameter.device) if name in masks else torch.zeros_like(parameter, dtype=torch.bool)
        for name, parameter in parameters.items()
    }
