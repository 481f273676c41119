"""What a pattern can do, and what it may be asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from sparsesam.masks.select import check_alike, random_scores

Scores = Mapping[str, Tensor]
# The largest of given scores, or any, drawn uniformly with a generator over the pattern's units.
Choice = Mapping[str, Tensor] | torch.Generator


class Pattern(ABC):
    """A family of allowed masks."""

    @property
    def implied_sparsity(self) -> float | None:
        """The sparsity that the pattern fixes by itself, or None if it has to be given."""
        return None

    @abstractmethod
    def select(self, scores: Scores, sparsity: float | None = None) -> dict[str, Tensor]:
        """The best allowed mask with at most round((1 - sparsity) * d) ones, d the number of scores.

        Ties go to the earlier position; -inf is never chosen. Masks are contiguous bool tensors of the
        scores' shapes, on their device.
        """

    def draw(
        self, like: Mapping[str, Tensor], generator: torch.Generator, sparsity: float | None = None
    ) -> dict[str, Tensor]:
        """An allowed mask at random, uniform over the pattern's units, with the budget of :meth:`select`."""
        return self.select(random_scores(like, generator=generator), sparsity)

    def drop_and_grow(
        self,
        masks: Mapping[str, Tensor],
        keep: Choice,
        grow: Choice,
        *,
        sparsity: float | None = None,
        ratio: float,
    ) -> dict[str, Tensor]:
        """Drop, then grow (Algorithm 2, option II).

        N_drop = round(ratio * kept) of the kept weights go, those with the smallest ``keep``; then the mask
        grows back to its budget among all weights that are not kept now, the just dropped included.

        Args:
            masks: what is kept, as :meth:`select` or :meth:`drop_and_grow` returned it.
            keep: scores of the kept weights; the paper's is |gradient|. A generator drops at random.
            grow: scores of which the largest grow, or a generator: then growth is uniformly random over the
                pattern's units (entries, filters, ...).
            sparsity: as in :meth:`select`. The budget is computed from it each time, so it never drifts.
            ratio: part of the kept weights to drop, in [0, 1].
        """
        _check_exchange(masks, keep, grow, ratio)
        return self._drop_and_grow(masks, keep, grow, sparsity, ratio)

    @abstractmethod
    def _drop_and_grow(
        self, masks: Mapping[str, Tensor], keep: Choice, grow: Choice, sparsity: float | None, ratio: float
    ) -> dict[str, Tensor]:
        """What :meth:`drop_and_grow` says, of arguments that were checked."""


def weight_budget(like: Mapping[str, Tensor], sparsity: float | None, pattern: Pattern) -> int:
    if sparsity is None:
        raise ValueError(f"sparsity must be given with {pattern}, got None; 0.5 perturbs half of the weights")
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity must be in [0, 1], got {sparsity}; 0 perturbs every weight, 1 none")
    return round((1 - sparsity) * sum(tensor.numel() for tensor in like.values()))


def _check_exchange(masks: Mapping[str, Tensor], keep: Choice, grow: Choice, ratio: float) -> None:
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio must be in [0, 1], got {ratio}; 0 keeps the mask, 1 drops all of it")
    for label, choice in (("keep", keep), ("grow", grow)):
        if not isinstance(choice, torch.Generator):
            check_alike(masks, choice, label=label)
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise ValueError(f"masks[{name!r}] must be a bool tensor, got {mask.dtype}; convert with .bool()")


def check_choice(argument: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
