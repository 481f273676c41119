"""The interface of patterns, and the two simplest: any weights, and another pattern in every tensor by itself."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards
from sparsesam.masks.select import Tensors, check_alike, count_true, random_scores, top_mask

# The largest of given scores, or any, drawn uniformly with a generator over the pattern's units.
Choice = Tensors | torch.Generator


class Pattern(ABC):
    """A family of allowed masks.

    With ``shards``, tensors are the parts of them that this rank holds, and all ranks call together; masks are then the
    parts of what one process would choose.
    """

    @property
    def knows_shards(self) -> bool:
        """Whether it can be given shards."""
        return False

    @property
    def implied_sparsity(self) -> float | None:
        """The sparsity that the pattern fixes by itself, or None if it has to be given."""
        return None

    def check_sparsity(self, sparsity: float | None) -> None:
        """Raise ValueError unless it is in [0, 1], and given or implied but not both differently."""
        implied = self.implied_sparsity
        if sparsity is None and implied is None:
            raise ValueError(f"sparsity must be given with {self}, got None; 0.5 perturbs half of the weights")
        if sparsity is not None and not (hasattr(sparsity, "__float__") and 0 <= sparsity <= 1):
            raise ValueError(f"sparsity must be in [0, 1], got {sparsity}; 0 perturbs every weight, 1 none")
        if sparsity is not None and implied is not None and not math.isclose(sparsity, implied, abs_tol=1e-9):
            raise ValueError(
                f"sparsity must be left out with {self}, which implies {implied:g}, got {sparsity}; change n and m to "
                "change it"
            )

    def select(
        self, scores: Tensors, sparsity: float | None = None, *, shards: Shards | None = None
    ) -> dict[str, Tensor]:
        """The best allowed mask with at most round((1 - sparsity) * d) ones, d the number of scores.

        Ties go to the earlier position; -inf is never chosen. Masks are contiguous bool tensors of the
        scores' shapes, on their device.
        """
        self.check_sparsity(sparsity)
        return self._choose(scores, scores, sparsity, shards or Shards.whole(scores))

    def draw(
        self,
        like: Tensors,
        generator: torch.Generator,
        sparsity: float | None = None,
        *,
        shards: Shards | None = None,
    ) -> dict[str, Tensor]:
        """An allowed mask at random, uniform over the pattern's units, with the budget of `select`."""
        self.check_sparsity(sparsity)
        return self._choose(generator, like, sparsity, shards or Shards.whole(like))

    def drop_and_grow(
        self,
        masks: Tensors,
        keep: Choice,
        grow: Choice,
        *,
        sparsity: float | None = None,
        ratio: float,
        shards: Shards | None = None,
    ) -> dict[str, Tensor]:
        """Drop, then grow (Algorithm 2, option II).

        N_drop = round(ratio * kept) of the kept weights go, those with the smallest ``keep``; then the mask
        grows back to its budget among all weights that are not kept now, the just dropped included.

        Args:
            masks: what is kept, as `select` or `drop_and_grow` returned it.
            keep: scores of the kept weights; the paper's is |gradient|. A generator drops at random.
            grow: scores of which the largest grow, or a generator: then growth is uniformly random over the
                pattern's units (entries, filters, ...).
            sparsity: as in `select`. The budget is computed from it each time, so it never drifts.
            ratio: part of the kept weights to drop, in [0, 1].
            shards: which part of the tensors this rank holds; all of them by default.
        """
        self.check_sparsity(sparsity)
        _check_arguments(masks, keep, grow, ratio)
        return self._drop_and_grow(masks, keep, grow, sparsity, ratio, shards or Shards.whole(masks))

    @abstractmethod
    def _choose(self, choice: Choice, like: Tensors, sparsity: float | None, shards: Shards) -> dict[str, Tensor]:
        """What `select` and `draw` say, of a sparsity that was checked; masks are like ``like``."""

    @abstractmethod
    def _drop_and_grow(
        self, masks: Tensors, keep: Choice, grow: Choice, sparsity: float | None, ratio: float, shards: Shards
    ) -> dict[str, Tensor]:
        """What `drop_and_grow` says, of arguments that were checked."""


def scores_of(choice: Choice, like: Tensors, shards: Shards) -> Tensors:
    return random_scores(like, generator=choice, shards=shards) if isinstance(choice, torch.Generator) else choice


def weight_budget(shards: Shards, sparsity: float | None) -> int:
    assert sparsity is not None, "these patterns imply none"
    return round((1 - sparsity) * shards.total)


def left_after_drop(kept: int, ratio: float) -> int:
    return kept - round(ratio * kept)


def _check_arguments(masks: Tensors, keep: Choice, grow: Choice, ratio: float) -> None:
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio must be in [0, 1], got {ratio}; 0 keeps the mask, 1 drops all of it")
    for label, choice in (("keep", keep), ("grow", grow)):
        if not isinstance(choice, torch.Generator):
            check_alike(masks, choice, label=label)
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise ValueError(f"masks[{name!r}] must be a bool tensor, got {mask.dtype}; convert with .bool()")


@dataclass(frozen=True)
class Unstructured(Pattern):
    """Any set of weights: the global top-k, with exactly round((1 - sparsity) * d) ones."""

    knows_shards = True

    def _choose(self, choice: Choice, like: Tensors, sparsity: float | None, shards: Shards) -> dict[str, Tensor]:
        return top_mask(scores_of(choice, like, shards), weight_budget(shards, sparsity), shards=shards)

    def _drop_and_grow(
        self, masks: Tensors, keep: Choice, grow: Choice, sparsity: float | None, ratio: float, shards: Shards
    ) -> dict[str, Tensor]:
        budget = weight_budget(shards, sparsity)
        left = min(left_after_drop(count_true(masks, shards), ratio), budget)
        survivors = top_mask(scores_of(keep, masks, shards), left, among=masks, shards=shards)
        return top_mask(scores_of(grow, masks, shards), budget, first=survivors, shards=shards)


@dataclass(frozen=True)
class PerLayer(Pattern):
    """``inner`` applied to every tensor alone, each with its own budget round((1 - sparsity) * its size)."""

    inner: Pattern

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Pattern):
            raise TypeError(f'inner must be a Pattern, such as as_pattern("2:4"), got {self.inner!r}')

    @property
    def knows_shards(self) -> bool:
        return self.inner.knows_shards

    @property
    def implied_sparsity(self) -> float | None:
        """That of the inner pattern."""
        return self.inner.implied_sparsity

    def _choose(self, choice: Choice, like: Tensors, sparsity: float | None, shards: Shards) -> dict[str, Tensor]:
        masks: dict[str, Tensor] = {}
        for name, tensor in like.items():
            masks |= self.inner._choose(_only(name, choice), {name: tensor}, sparsity, shards.only(name))
        return masks

    def _drop_and_grow(
        self, masks: Tensors, keep: Choice, grow: Choice, sparsity: float | None, ratio: float, shards: Shards
    ) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        for name, mask in masks.items():
            own = _only(name, keep), _only(name, grow)
            result |= self.inner._drop_and_grow({name: mask}, *own, sparsity, ratio, shards.only(name))
        return result


def _only(name: str, choice: Choice) -> Choice:
    return choice if isinstance(choice, torch.Generator) else {name: choice[name]}
