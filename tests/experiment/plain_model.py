"""A network without batch normalization: its gradient is the mean over images, however they are spread over ranks."""

from torch import nn


def build(num_classes, in_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, num_classes)
    ).double()
