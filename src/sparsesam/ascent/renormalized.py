"""Embeddings with ``max_norm`` scale their rows in place in every forward; those of the second pass are taken back."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RenormalizedWeights:
    """The weights that a forward writes to, to be put back later: whole rows change, whatever the mask keeps."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = _renormalized_in_forward(model)
        self._values = [weight.detach().clone() for weight in self._weights]

    @torch.no_grad()
    def restore(self) -> None:
        for weight, value in zip(self._weights, self._values, strict=True):
            weight.copy_(value)


def _renormalized_in_forward(model: nn.Module) -> list[Tensor]:
    # Every step of every optimizer comes here: model.modules(), and asking a module for an attribute that it does not
    # have, take several times longer.
    modules, found = {id(model): model}, {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        is_plain = not isinstance(module, torch.jit.ScriptModule) and not hasattr(type(module), "max_norm")
        max_norm = module.__dict__.get("max_norm") if is_plain else getattr(module, "max_norm", None)
        weight = None if max_norm is None else getattr(module, "weight", None)
        if isinstance(weight, Tensor):
            found[id(weight)] = weight
        for child in module._modules.values():
            if child is not None and id(child) not in modules:
                modules[id(child)] = child
                waiting.append(child)
    return list(found.values())
