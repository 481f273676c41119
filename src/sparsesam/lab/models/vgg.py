"""VGG with batch normalization (Simonyan & Zisserman 2015; Ioffe & Szegedy 2015)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Literal

from torch import nn

from sparsesam.lab.models.resnet import he_initialized, is_small

Head = Literal["linear", "4096"]


def vgg(
    stages: Sequence[Sequence[int]],
    num_classes: int = 10,
    in_channels: int = 3,
    image_size: int = 32,
    *,
    head: Head | None = None,
) -> nn.Sequential:
    """Stages of 3x3 convolutions with the given channels, each stage closed by a 2x2 max-pool.

    The published ``head`` is "4096": two hidden layers of that many with dropout, over 7x7 positions of large images
    and one of small ones. For CIFAR "linear" is as usual: the mean over positions and one linear layer. The default
    is "4096" for large images, "linear" for small ones. A pool is left out once the side is a single pixel.
    """
    side_of_head = 1 if is_small(image_size) else 7
    is_linear = (head or ("linear" if is_small(image_size) else "4096")) == "linear"
    features: list[nn.Module] = []
    side = image_size
    for stage in stages:
        for channels in stage:
            features += [
                nn.Conv2d(in_channels, channels, 3, padding=1),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
            ]
            in_channels = channels
        if side > 1:
            features.append(nn.MaxPool2d(2))
            side //= 2
    return he_initialized(
        nn.Sequential(
            OrderedDict(
                features=nn.Sequential(*features),
                pool=nn.AdaptiveAvgPool2d(1 if is_linear else side_of_head),
                flatten=nn.Flatten(),
                classifier=nn.Linear(in_channels, num_classes)
                if is_linear
                else _published_head(side_of_head**2 * in_channels, num_classes),
            )
        )
    )


def _published_head(features: int, num_classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(features, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, num_classes),
    )


_ELEVEN = ((64,), (128,), (256, 256), (512, 512), (512, 512))

vgg11_bn = partial(vgg, _ELEVEN)
"""9,231,114 parameters for CIFAR-10 (one linear layer as head), 132,868,840 for ImageNet."""

vgg11_bn_4096 = partial(vgg, _ELEVEN, head="4096")
"""The published head on small images too, 512-4096-4096 with dropout: 28,149,514 parameters for CIFAR-10."""

vgg_small = partial(vgg, ((16,), (32,), (64, 64), (128,)))
"""Five convolutions and at most a quarter of the channels: VGG's shape for a laptop's CPU."""
