"""Networks for questions that the package's own do not answer."""

from __future__ import annotations

from torch import nn

from sparsesam.lab.models import build_model


def small_cnn_groupnorm(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """`small-cnn` with group in place of batch normalization: nothing mixes samples, nothing has running statistics."""
    model = build_model("small-cnn", num_classes, in_channels, image_size)
    for name, module in model.named_children():
        if isinstance(module, nn.BatchNorm2d):
            setattr(model, name, nn.GroupNorm(8, module.num_features))
    return model


def small_cnn_plain(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """`small-cnn` without normalization: the length of a weight matters, not only its direction."""
    model = build_model("small-cnn", num_classes, in_channels, image_size)
    for name, module in model.named_children():
        if isinstance(module, nn.BatchNorm2d):
            setattr(model, name, nn.Identity())
    return model
