"""Embeddings with ``max_norm`` scale their rows in place in every forward; those of the second pass are taken back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def renormalized_in_forward(model: nn.Module) -> list[Tensor]:
    """The weights that a forward writes to."""
    modules = [one for one in model.modules() if getattr(one, "max_norm", None) is not None]
    weights = [getattr(one, "weight", None) for one in modules]
    return list({id(weight): weight for weight in weights if isinstance(weight, Tensor)}.values())


class RenormalizedWeights:
    """Copies of them, to be put back later: whole rows change, whatever the mask keeps."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = weights
        self._values = [weight.detach().clone() for weight in weights]

    @torch.no_grad()
    def restore(self) -> None:
        for weight, value in zip(self._weights, self._values, strict=True):
            weight.copy_(value)
