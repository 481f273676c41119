"""A network without batch normalization: its gradient is the mean over images, however they are spread over ranks."""

from torch import nn


class Double(nn.Module):
    def forward(self, x):
        return x.double()


def build(num_classes, in_channels):
    """In float64, so that ranks' rounding does not decide which of two equal weights a mask keeps."""
    layers = nn.Sequential(nn.Conv2d(in_channels, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, num_classes))
    return nn.Sequential(Double(), layers.double())
