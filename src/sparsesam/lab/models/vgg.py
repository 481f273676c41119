"""VGG with batch normalization (Simonyan & Zisserman 2015; Ioffe & Szegedy 2015)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from sparsesam.lab.models.initialize import he_initialized
from sparsesam.lab.models.stem import is_small


def vgg(stages: Sequence[Sequence[int]], num_classes: int, in_channels: int, image_size: int) -> nn.Sequential:
    """Stages of 3x3 convolutions with the given channels, each stage closed by a 2x2 max-pool.

    Large images get the published head: 7x7 pooling, two hidden layers of 4096 with dropout. Small ones get the
    head that is usual for CIFAR: the mean over positions and one linear layer. A pool is left out once the side is
    a single pixel.
    """
    small = is_small(image_size)
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
                pool=nn.AdaptiveAvgPool2d(1 if small else 7),
                flatten=nn.Flatten(),
                classifier=nn.Linear(in_channels, num_classes) if small else _published_head(in_channels, num_classes),
            )
        )
    )


def _published_head(channels: int, num_classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(49 * channels, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, num_classes),
    )


def vgg11_bn(num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> nn.Sequential:
    """9,231,114 parameters for CIFAR-10 (one linear layer as head), 132,868,840 for ImageNet."""
    stages = ((64,), (128,), (256, 256), (512, 512), (512, 512))
    return vgg(stages, num_classes, in_channels, image_size)


def vgg_small(num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> nn.Sequential:
    """Five convolutions and at most a quarter of the channels: VGG's shape for a laptop's CPU."""
    return vgg(((16,), (32,), (64, 64), (128,)), num_classes, in_channels, image_size)
