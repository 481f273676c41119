"""VGG with batch normalization (Simonyan & Zisserman 2015; Ioffe & Szegedy 2015), and a small CNN."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from sparsesam.lab.models.resnet import SMALL_SIDE, he_initialized


def _convolution(in_channels: int, out_channels: int, *, bias: bool) -> list[nn.Module]:
    return [nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=bias), nn.BatchNorm2d(out_channels), nn.ReLU()]


def vgg(
    depths: Sequence[int],
    num_classes: int = 10,
    in_channels: int = 3,
    image_size: int = 32,
    *,
    width: int = 64,
    published_head: bool = False,
) -> nn.Sequential:
    """Stages of ``depths`` 3x3 convolutions, of 1, 2, 4, 8 and 8 times ``width`` channels, each with a 2x2 max-pool.

    The published head has two hidden layers of width 4096 with dropout, over 7x7 positions of large images and one of
    small ones. For small images the default is the usual one: the mean over positions and one linear layer. Pools are
    left out once the side is a single pixel.
    """
    is_small, features, side = image_size <= SMALL_SIDE, nn.Sequential(), image_size
    for stage, depth in enumerate(depths):
        channels = width * 2 ** min(stage, 3)
        for _ in range(depth):
            features.extend(_convolution(in_channels, channels, bias=True))
            in_channels = channels
        if side > 1:
            features.append(nn.MaxPool2d(2))
            side //= 2
    places, hidden = 1 if is_small else 7, nn.Sequential()
    if published_head or not is_small:
        for inputs in (places**2 * in_channels, 4096):
            hidden.extend([nn.Linear(inputs, 4096), nn.ReLU(), nn.Dropout()])
    last = nn.Linear(4096 if len(hidden) else in_channels, num_classes)
    classifier = hidden.append(last) if len(hidden) else last
    pool = nn.AdaptiveAvgPool2d(places)
    return he_initialized({"features": features, "pool": pool, "flatten": nn.Flatten(), "classifier": classifier})


def small_cnn(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """Three 3x3 convolutions (32, 32, 64 channels) for small images such as 8x8 digits; trains in seconds."""
    return nn.Sequential(
        *_convolution(in_channels, 32, bias=False),
        *_convolution(32, 32, bias=False),
        nn.MaxPool2d(2),
        *_convolution(32, 64, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )
