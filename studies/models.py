"""Additional networks for the studies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from sparsesam.lab.models import build_model


def small_cnn_groupnorm(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """`small-cnn` with group instead of batch normalization: no mixing of samples, no running statistics."""
    return _replaced(build_model("small-cnn", num_classes, in_channels, image_size), partial(nn.GroupNorm, 8))


def small_cnn_plain(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """`small-cnn` without normalization: the norm of a weight matters, not only its direction."""
    return _replaced(build_model("small-cnn", num_classes, in_channels, image_size), nn.Identity)


def _replaced(model: nn.Module, normalization: Callable[[int], nn.Module]) -> nn.Module:
    for name, module in model.named_children():
        if isinstance(module, nn.BatchNorm2d):
            setattr(model, name, normalization(module.num_features))
    return model
