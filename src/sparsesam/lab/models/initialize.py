"""How convolutions start (He et al. 2015)."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

ModelT = TypeVar("ModelT", bound=nn.Module)


def he_initialized(model: ModelT) -> ModelT:
    """The model, its convolutions drawn from N(0, 2 / fan_out) with zero bias; other layers keep torch's start."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
