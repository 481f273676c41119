"""Networks without batch normalization: their gradient is the mean over images, however they are spread over ranks."""

from torch import nn


class Double(nn.Module):
    def forward(self, x):
        return x.double()


class ReusedConv2d(nn.Conv2d):
    """The engine reuses layers that are not torch's own whatever their size, in processes without our conftest too."""


def build(num_classes, in_channels):
    """In float64, so that ranks' rounding does not decide which of two equal weights a mask keeps."""
    layers = nn.Sequential(nn.Conv2d(in_channels, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, num_classes))
    return nn.Sequential(Double(), layers.double())


def build_with_late_normalization(num_classes, in_channels):
    """SAM on its normalization layers perturbs only the last stage."""
    last = nn.Sequential(nn.Flatten(), nn.LayerNorm(8 * 6 * 6), nn.Linear(8 * 6 * 6, num_classes))
    return nn.Sequential(Double(), nn.Sequential(ReusedConv2d(in_channels, 8, 3), nn.ReLU()).double(), last.double())
