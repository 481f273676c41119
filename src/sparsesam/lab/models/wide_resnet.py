"""Wide residual networks (Zagoruyko & Komodakis 2016): few, wide blocks that normalize before they convolve."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from sparsesam.lab.models.resnet import he_initialized, stem_convolution, stem_pool


class PreActivationBlock(nn.Module):
    """shortcut + conv(relu(bn(conv(relu(bn(x)))))), both convolutions 3x3.

    Where the shape changes the shortcut is a 1x1 convolution of relu(bn(x)); elsewhere it is x itself.
    """

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


def wide_resnet(
    depth: int, widening: int, num_classes: int = 10, in_channels: int = 3, image_size: int = 32
) -> nn.Sequential:
    """WRN-depth-widening: three stages of (depth - 4) / 6 blocks, 16, 32 and 64 times ``widening`` channels."""
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"depth must be 6 n + 4 with n at least 1, as 10, 16, 22, 28, got {depth}")
    stages: OrderedDict[str, nn.Module] = OrderedDict()
    channels = 16
    for number in range(3):
        wide = 16 * widening * 2**number
        strides = [2 if number else 1] + [1] * ((depth - 4) // 6 - 1)
        blocks = []
        for stride in strides:
            blocks.append(PreActivationBlock(channels, wide, stride))
            channels = wide
        stages[f"layer{number + 1}"] = nn.Sequential(*blocks)
    return he_initialized(
        nn.Sequential(
            OrderedDict(
                conv1=stem_convolution(in_channels, 16, image_size),
                **stem_pool(image_size),
                **stages,
                bn=nn.BatchNorm2d(channels),
                relu=nn.ReLU(),
                pool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                fc=nn.Linear(channels, num_classes),
            )
        )
    )
