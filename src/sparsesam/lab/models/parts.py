"""What the convolutional networks share: how they begin, and their initial weights."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

ModelT = TypeVar("ModelT", bound=nn.Module)

SMALL_SIDE = 64
"""Up to this many pixels an image is small: CIFAR (32), Tiny ImageNet (64), digits (8)."""


def is_small(image_size: int) -> bool:
    if image_size < 1:
        raise ValueError(f"image_size must be at least 1, the side in pixels, got {image_size}")
    return image_size <= SMALL_SIDE


def stem_convolution(in_channels: int, out_channels: int, image_size: int) -> nn.Conv2d:
    """3x3 with stride 1 for small images (CIFAR stem), 7x7 with stride 2 for others (ImageNet stem)."""
    if is_small(image_size):
        return nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    return nn.Conv2d(in_channels, out_channels, 7, stride=2, padding=3, bias=False)


def stem_pool(image_size: int) -> dict[str, nn.Module]:
    """The ImageNet stem's max-pool, under its name; none for small images."""
    return {} if is_small(image_size) else {"maxpool": nn.MaxPool2d(3, stride=2, padding=1)}


def he_initialized(model: ModelT) -> ModelT:
    """The model, its convolutions drawn from N(0, 2 / fan_out) with zero bias; other layers keep torch's start."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
