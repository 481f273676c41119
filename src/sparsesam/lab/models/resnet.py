"""ResNets (He et al. 2016) and wide ResNets (Zagoruyko & Komodakis 2016), which have pre-activation blocks.

For small images they have the SSAM paper's 3x3 stem and no max-pool, otherwise the published stem.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

#: The largest side of small images: CIFAR (32), Tiny ImageNet (64), digits (8).
SMALL_SIDE = 64


def he_initialized(layers: dict[str, nn.Module]) -> nn.Sequential:
    """Returns the layers in sequence, convolutions drawn from N(0, 2 / fan_out) with zero bias; others as in torch."""
    model = nn.Sequential(OrderedDict(layers))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def _convolution(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, size, stride=stride, padding=size // 2, bias=False)


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Returns a 1x1 convolution with normalization if the shape changes, else the identity."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(_convolution(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))


class BasicBlock(nn.Module):
    """relu(shortcut(x) + bn(conv(relu(bn(conv(x)))))), both convolutions 3x3."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.bn1(self.conv1(x)).relu()
        outer: Tensor = self.bn2(self.conv2(inner)) + self.shortcut(x)
        return outer.relu()


class Bottleneck(nn.Module):
    """1x1 down to ``width``, 3x3, 1x1 up to four times the width, added to the shortcut.

    The stride is in the 3x3 convolution, not in the first 1x1 as in the paper: the usual departure (ResNet v1.5).
    """

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, 4 * width, 1)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.shortcut = _shortcut(in_channels, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.bn1(self.conv1(x)).relu()
        inner = self.bn2(self.conv2(inner)).relu()
        outer: Tensor = self.bn3(self.conv3(inner)) + self.shortcut(x)
        return outer.relu()


class PreActivationBlock(nn.Module):
    """shortcut + conv(relu(bn(conv(relu(bn(x)))))), both convolutions 3x3.

    The shortcut is a 1x1 convolution of relu(bn(x)) if the shape changes, else x itself.
    """

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = _convolution(in_channels, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3)
        self.shortcut: nn.Module | None = None
        if stride != 1 or in_channels != width:
            self.shortcut = _convolution(in_channels, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        active: Tensor = self.bn1(x).relu()
        inner: Tensor = self.bn2(self.conv1(active)).relu()
        outer: Tensor = self.conv2(inner)
        return outer + (x if self.shortcut is None else self.shortcut(active))


def resnet(
    block: type[BasicBlock] | type[Bottleneck] | type[PreActivationBlock],
    depths: Sequence[int],
    num_classes: int = 10,
    in_channels: int = 3,
    image_size: int = 32,
    *,
    width: int = 64,
    stem: int | None = None,
) -> nn.Sequential:
    """A stem of ``stem`` channels (default ``width``), a stage for each of ``depths``, and a linear classifier.

    The first stage has ``width`` channels; each one after it halves the side and doubles the width.
    """
    is_small, normalizes_last = image_size <= SMALL_SIDE, block is PreActivationBlock
    channels = stem or width
    layers: dict[str, nn.Module] = {}
    layers["conv1"] = _convolution(in_channels, channels, 3 if is_small else 7, 1 if is_small else 2)
    if not normalizes_last:
        layers |= {"bn1": nn.BatchNorm2d(channels), "relu": nn.ReLU()}
    if not is_small:
        layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    for stage, depth in enumerate(depths):
        blocks: list[nn.Module] = []
        for place in range(depth):
            blocks.append(block(channels, width * 2**stage, 2 if stage and not place else 1))
            channels = width * 2**stage * block.expansion
        layers[f"layer{stage + 1}"] = nn.Sequential(*blocks)
    if normalizes_last:
        layers |= {"bn": nn.BatchNorm2d(channels), "relu": nn.ReLU()}
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(channels, num_classes)}
    return he_initialized(layers)


def wide_resnet(
    depth: int, widening: int, num_classes: int = 10, in_channels: int = 3, image_size: int = 32
) -> nn.Sequential:
    """WRN-depth-widening: three stages of (depth - 4) / 6 blocks, 16, 32 and 64 times ``widening`` channels."""
    depths = [(depth - 4) // 6] * 3
    return resnet(PreActivationBlock, depths, num_classes, in_channels, image_size, width=16 * widening, stem=16)


resnet18 = partial(resnet, BasicBlock, (2, 2, 2, 2))
"""11,173,962 parameters for CIFAR-10, 11,689,512 for ImageNet."""
