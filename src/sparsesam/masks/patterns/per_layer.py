"""A pattern in every tensor by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsesam.masks.patterns.base import Choice, Pattern, Scores


@dataclass(frozen=True)
class PerLayer(Pattern):
    """``inner`` applied to every tensor alone, each with its own budget round((1 - sparsity) * its size)."""

    inner: Pattern

    @property
    def implied_sparsity(self) -> float | None:
        """That of the inner pattern."""
        return self.inner.implied_sparsity

    def select(self, scores: Scores, sparsity: float | None = None) -> dict[str, Tensor]:
        """See :meth:`Pattern.select`."""
        masks: dict[str, Tensor] = {}
        for name, score in scores.items():
            masks |= self.inner.select({name: score}, sparsity)
        return masks

    def draw(
        self, like: Mapping[str, Tensor], generator: torch.Generator, sparsity: float | None = None
    ) -> dict[str, Tensor]:
        masks: dict[str, Tensor] = {}
        for name, tensor in like.items():
            masks |= self.inner.draw({name: tensor}, generator, sparsity)
        return masks

    def _drop_and_grow(
        self, masks: Mapping[str, Tensor], keep: Choice, grow: Choice, sparsity: float | None, ratio: float
    ) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        for name, mask in masks.items():
            own_keep, own_grow = (c if isinstance(c, torch.Generator) else {name: c[name]} for c in (keep, grow))
            result |= self.inner.drop_and_grow({name: mask}, own_keep, own_grow, sparsity=sparsity, ratio=ratio)
        return result
