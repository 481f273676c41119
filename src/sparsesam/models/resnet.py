"""ResNet-18 (He et al. 2016) for 32x32 images: with the paper's 3x3 stem and without the max-pool."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """relu(shortcut(x) + bn(conv(relu(bn(conv(x)))))), both convolutions 3x3.

    The shortcut is a 1x1 convolution with normalization where the shape changes, and the identity elsewhere.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in_channels, h, w) to (batch, out_channels, h / stride, w / stride)."""
        inner: Tensor = self.bn1(self.conv1(x)).relu()
        outer: Tensor = self.bn2(self.conv2(inner)) + self.shortcut(x)
        return outer.relu()


def _stage(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(in_channels, out_channels, stride), BasicBlock(out_channels, out_channels, 1))


def resnet18(num_classes: int = 10) -> nn.Sequential:
    """ResNet-18 for (batch, 3, 32, 32) images; 11,173,962 parameters for ten classes."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 64, 3, padding=1, bias=False),
            bn1=nn.BatchNorm2d(64),
            relu=nn.ReLU(),
            layer1=_stage(64, 64, stride=1),
            layer2=_stage(64, 128, stride=2),
            layer3=_stage(128, 256, stride=2),
            layer4=_stage(256, 512, stride=2),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(512, num_classes),
        )
    )
