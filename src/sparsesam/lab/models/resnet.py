"""ResNets (He et al. 2016) and wide ones (Zagoruyko & Komodakis 2016), whose blocks normalize before they convolve.

On small images with the SSAM paper's 3x3 stem and no max-pool, else as published.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from torch import Tensor, nn

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


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """A 1x1 convolution with normalization where the shape changes, the identity elsewhere."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )


class BasicBlock(nn.Module):
    """relu(shortcut(x) + bn(conv(relu(bn(conv(x)))))), both convolutions 3x3."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in_channels, h, w) to (batch, width, h / stride, w / stride)."""
        inner: Tensor = self.bn1(self.conv1(x)).relu()
        outer: Tensor = self.bn2(self.conv2(inner)) + self.shortcut(x)
        return outer.relu()


class Bottleneck(nn.Module):
    """1x1 down to ``width``, 3x3, 1x1 up to four times the width, added to the shortcut.

    The stride is the 3x3 convolution's, not the first 1x1's as in the paper: the usual departure (ResNet v1.5).
    """

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.shortcut = _shortcut(in_channels, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in_channels, h, w) to (batch, 4 width, h / stride, w / stride)."""
        inner: Tensor = self.bn1(self.conv1(x)).relu()
        inner = self.bn2(self.conv2(inner)).relu()
        outer: Tensor = self.bn3(self.conv3(inner)) + self.shortcut(x)
        return outer.relu()


class PreActivationBlock(nn.Module):
    """shortcut + conv(relu(bn(conv(relu(bn(x)))))), both convolutions 3x3.

    Where the shape changes the shortcut is a 1x1 convolution of relu(bn(x)); elsewhere it is x itself.
    """

    expansion = 1

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.shortcut: nn.Module | None = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in_channels, h, w) to (batch, out_channels, h / stride, w / stride)."""
        active: Tensor = self.bn1(x).relu()
        inner: Tensor = self.bn2(self.conv1(active)).relu()
        outer: Tensor = self.conv2(inner)
        return outer + (x if self.shortcut is None else self.shortcut(active))


Block = type[BasicBlock] | type[Bottleneck] | type[PreActivationBlock]


def _stages(block: Block, depths: Sequence[int], channels: int, width: int) -> dict[str, nn.Module]:
    """Stages of ``depths`` blocks; each stage after the first halves the side and doubles the width."""
    stages: dict[str, nn.Module] = {}
    for number, depth in enumerate(depths):
        wide = width * 2**number
        blocks: list[nn.Module] = []
        for place in range(depth):
            blocks.append(block(channels, wide, 2 if number and not place else 1))
            channels = wide * block.expansion
        stages[f"layer{number + 1}"] = nn.Sequential(*blocks)
    return stages


def _classifier(channels: int, num_classes: int) -> dict[str, nn.Module]:
    return {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(channels, num_classes)}


def resnet(
    block: type[BasicBlock] | type[Bottleneck],
    depths: Sequence[int],
    num_classes: int = 10,
    in_channels: int = 3,
    image_size: int = 32,
    *,
    width: int = 64,
) -> nn.Sequential:
    """A stem, a stage for each of ``depths`` beginning with ``width`` channels, and a linear classifier."""
    layers = OrderedDict(
        conv1=stem_convolution(in_channels, width, image_size),
        bn1=nn.BatchNorm2d(width),
        relu=nn.ReLU(),
        **stem_pool(image_size),
        **_stages(block, depths, width, width),
        **_classifier(width * 2 ** (len(depths) - 1) * block.expansion, num_classes),
    )
    return he_initialized(nn.Sequential(layers))


def wide_resnet(
    depth: int, widening: int, num_classes: int = 10, in_channels: int = 3, image_size: int = 32
) -> nn.Sequential:
    """WRN-depth-widening: three stages of (depth - 4) / 6 blocks, 16, 32 and 64 times ``widening`` channels."""
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"depth must be 6 n + 4 with n at least 1, as 10, 16, 22, 28, got {depth}")
    last = 64 * widening
    layers = OrderedDict(
        conv1=stem_convolution(in_channels, 16, image_size),
        **stem_pool(image_size),
        **_stages(PreActivationBlock, [(depth - 4) // 6] * 3, 16, 16 * widening),
        bn=nn.BatchNorm2d(last),
        relu=nn.ReLU(),
        **_classifier(last, num_classes),
    )
    return he_initialized(nn.Sequential(layers))


resnet18 = partial(resnet, BasicBlock, (2, 2, 2, 2))
"""11,173,962 parameters for CIFAR-10, 11,689,512 for ImageNet."""

resnet50 = partial(resnet, Bottleneck, (3, 4, 6, 3))
"""23,520,842 parameters for CIFAR-10, 25,557,032 for ImageNet."""

resnet10_small = partial(resnet, BasicBlock, (1, 1, 1, 1), width=16)
"""One block per stage and a quarter of the width: ResNet-18's shape for a laptop's CPU."""
