"""Mask rules: a mask is composed of a score, a pattern and the number of steps after which it is made anew.

`fisher_mask`, `dynamic_mask` and `random_mask` compose the usual ones.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from sparsesam.masks.fisher import LossFn, ModelLoss
from sparsesam.masks.patterns import Pattern, Unstructured, as_pattern
from sparsesam.masks.scores import Fisher, GradientMagnitude, Score, ScoreContext, WeightMagnitude
from sparsesam.utils.checks import check_choice, check_count, check_number


class MaskRule(ABC):
    """Base class of all mask rules, which decide which weights are perturbed.

    A rule has no state: the optimizer and its checkpoints hold the current masks and the random generator, which is
    seeded with ``seed``. A mask is made before the first ascent, then every ``refresh`` optimizer steps; None: only
    when ``opt.refresh_mask()`` is called.
    """

    refresh: int | None
    seed: int
    #: whether the purpose is to save time, which norm="full" would prevent
    needs_masked_norm: ClassVar[bool] = False
    #: whether `make` supports a context with shards, and then returns this rank's part of the masks
    knows_shards: ClassVar[bool] = False

    @property
    def needs_gradient(self) -> bool:
        """Whether a refresh needs the ascent gradient, and so runs after the first pass."""
        return False

    @abstractmethod
    def make(self, context: ScoreContext) -> dict[str, Tensor]:
        """Returns a bool mask for each parameter of the context."""


@dataclass(frozen=True, eq=False)
class Mask(MaskRule):
    """Perturbs the weights with the largest scores; SSAM-F is ``Mask(score=Fisher(...), ...)``.

    Args:
        score: a number per weight, such as `Fisher` or `GradientMagnitude`; None: weights are drawn at random.
        pattern: which weights may be kept together.
        sparsity: the share of weights that is not perturbed; None where the pattern implies it.
        refresh: the optimizer steps between two masks; None: the first mask is kept until ``opt.refresh_mask()``.
        seed: the seed of random draws.
        keep: perturb the weights with the ``"largest"`` or, for ablations, the ``"smallest"`` scores.

    Examples:
        >>> score = sparsesam.Fisher(train_set, loss_fn, samples=16)
        >>> mask = sparsesam.Mask(score, sparsesam.NM(2, 4), refresh=100)
    """

    score: Score | None
    pattern: Pattern = field(default_factory=Unstructured)
    sparsity: float | None = None
    refresh: int | None = None
    seed: int = 0
    keep: Literal["largest", "smallest"] = "largest"
    knows_shards: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, Pattern):
            raise TypeError(f"pattern must be a Pattern, such as NM(2, 4), got {self.pattern!r}")
        if self.score is not None and not callable(self.score):
            raise TypeError(f"score must be a Score, such as GradientMagnitude(), got {self.score!r}")
        self.pattern.check_sparsity(self.sparsity)
        if self.refresh is not None:
            check_count("refresh", self.refresh, "it is the number of steps between two masks, None for one mask")
        check_choice("keep", self.keep, ("largest", "smallest"))

    @property
    def needs_gradient(self) -> bool:
        return self.score is not None and self.score.needs_gradient

    def make(self, context: ScoreContext) -> dict[str, Tensor]:
        if self.sparsity in (0, 1) and self.pattern.implied_sparsity is None:  # no score could change the outcome
            is_kept = self.sparsity == 0
            return {name: torch.full_like(p, is_kept, dtype=torch.bool) for name, p in context.local.items()}
        return self._select(context)

    def _select(self, context: ScoreContext) -> dict[str, Tensor]:
        """The same as `make`, for a sparsity between 0 and 1."""
        if self.score is None:
            return self._draw(context)
        return self.pattern.select(self._scores(self.score, context), self.sparsity, shards=context.shards)

    def _draw(self, context: ScoreContext) -> dict[str, Tensor]:
        return self.pattern.draw(context.local, context.generator, self.sparsity, shards=context.shards)

    def _scores(self, score: Score, context: ScoreContext) -> dict[str, Tensor]:
        scores = context.scores(score)
        return scores if self.keep == "largest" else {name: -values for name, values in scores.items()}


def fisher_mask(
    data: Any = None,
    loss_fn: LossFn | None = None,
    *,
    sparsity: float | None = None,
    samples: int = 128,
    pattern: Pattern | str = "unstructured",
    refresh: int | None = None,
    labels: Literal["data", "sampled"] = "data",
    model_loss: ModelLoss | None = None,
    seed: int = 0,
) -> Mask:
    """SSAM-F: perturbs the weights with the most Fisher information.

    Args:
        data: a dataset, a loader, a tuple of tensors or any iterable of batches. Without it, Fisher information is
            measured on the batch given to ``opt.step(closure, batch=…)``.
        loss_fn: the training loss, ``loss_fn(output, target)``.
        sparsity: the share of weights that is not perturbed, in [0, 1]; not given for n:m patterns, which imply it.
        samples: the number of samples drawn from ``data`` for each mask.
        pattern: a `Pattern` or its name, such as ``"filter"`` or ``"2:4"``.
        refresh: the optimizer steps between two masks, usually ``len(loader)``, an epoch. Default: the first mask is
            kept until ``opt.refresh_mask()``.
        labels: ``"data"``, the empirical Fisher information; ``"sampled"``, labels drawn from the model's output.
        model_loss: ``model_loss(model, batch)`` in place of ``loss_fn``, for models that compute their own loss.
        seed: the seed for drawing samples.

    Examples:
        >>> mask = sparsesam.fisher_mask(train_set, loss_fn, sparsity=0.5, refresh=100)
        >>> opt = sparsesam.SSAM(base, model, rho=0.1, mask=mask)
    """
    score = Fisher(data, loss_fn, samples=samples, model_loss=model_loss, labels=labels)
    return Mask(score, as_pattern(pattern), sparsity, refresh, seed)


def random_mask(
    *,
    sparsity: float | None = None,
    pattern: Pattern | str = "unstructured",
    refresh: int | None = None,
    seed: int = 0,
) -> Mask:
    """Perturbs weights that are drawn at random, the baseline of ablations; the arguments are those of `fisher_mask`.

    Examples:
        >>> opt = sparsesam.SSAM(base, model, rho=0.1, mask=sparsesam.random_mask(pattern="2:4"))
    """
    return Mask(None, as_pattern(pattern), sparsity, refresh, seed)


@dataclass(frozen=True, eq=False)
class DynamicMask(Mask):
    """The rule of `dynamic_mask`: ``score`` and ``keep`` say which weights stay, ``growth`` which grow, None at random.

    After t steps (in the paper, epochs) it drops the share drop_ratio / 2 * (1 + cos(pi * t / total_steps)).
    """

    growth: Score | None = None
    drop_ratio: float = 0.5
    total_steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("drop_ratio", self.drop_ratio, "it is the share of kept weights dropped", most=1)
        if self.total_steps is not None:
            check_count("total_steps", self.total_steps, "give epochs * len(loader)")

    @property
    def needs_gradient(self) -> bool:
        return any(score is not None and score.needs_gradient for score in (self.score, self.growth))

    def ratio(self, step: int) -> float:
        if self.total_steps is None:
            return self.drop_ratio
        return self.drop_ratio / 2 * (1 + math.cos(math.pi * min(1.0, step / self.total_steps)))

    def _select(self, context: ScoreContext) -> dict[str, Tensor]:
        if context.previous is None:
            return self._draw(context)
        masks = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in context.local.items()}
        masks |= {name: mask.unpack(masks[name].device) for name, mask in context.previous.items() if name in masks}
        return self.pattern.drop_and_grow(
            masks,
            context.generator if self.score is None else self._scores(self.score, context),
            context.generator if self.growth is None else context.scores(self.growth),
            sparsity=self.sparsity,
            ratio=self.ratio(context.step),
            shards=context.shards,
        )


def dynamic_mask(
    *,
    sparsity: float | None = None,
    drop_ratio: float = 0.5,
    total_steps: int | None = None,
    drop: Literal["flattest", "sharpest", "weight", "random"] | Score = "flattest",
    growth: Literal["random", "gradient", "weight"] | Score = "random",
    pattern: Pattern | str = "unstructured",
    refresh: int | None,
    seed: int = 0,
) -> DynamicMask:
    """SSAM-D: starts with a random mask; each refresh drops the flattest of the perturbed weights and grows as many.

    Args:
        sparsity: as in `fisher_mask`.
        drop_ratio: the share of the perturbed weights that the first refresh drops.
        total_steps: the steps of the training, over which the share falls to 0 along a cosine. Default: it is constant.
        drop: which weights are dropped: ``"flattest"``, those with the smallest gradient, or the smallest of another
            `Score`; ``"random"``, ``"sharpest"`` and ``"weight"``, those with the smallest abs(w), are ablations.
        growth: which weights are grown: ``"random"``, or those with the largest ``"gradient"``, abs(w) (``"weight"``)
            or other `Score`.
        pattern: as in `fisher_mask`.
        refresh: the optimizer steps between two masks; None: only when ``opt.refresh_mask()`` is called.
        seed: the seed of the random draws.

    Examples:
        >>> mask = sparsesam.dynamic_mask(sparsity=0.5, refresh=100)
        >>> opt = sparsesam.SSAM(base, model, rho=0.1, mask=mask)
    """
    return DynamicMask(
        _score("drop", drop, ("flattest", "sharpest", "weight", "random")),
        as_pattern(pattern),
        sparsity,
        refresh,
        seed,
        keep="smallest" if drop == "sharpest" else "largest",
        growth=_score("growth", growth, ("random", "gradient", "weight")),
        drop_ratio=drop_ratio,
        total_steps=total_steps,
    )


def _score(argument: str, value: str | Score, known: tuple[str, ...]) -> Score | None:
    """Returns the score by which weights are dropped or grown; None: at random."""
    if callable(value):
        return value
    check_choice(argument, value, known)
    return {"random": None, "weight": WeightMagnitude()}.get(value, GradientMagnitude())
