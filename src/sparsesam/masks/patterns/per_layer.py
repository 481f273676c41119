"""A pattern in every tensor by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards
from sparsesam.masks.patterns.base import Choice, Pattern
from sparsesam.masks.select import Tensors


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
