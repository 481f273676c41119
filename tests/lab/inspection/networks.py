"""Networks and data that a test's run names as module:function."""

import torch
from torch import nn
from torch.nn.functional import dropout


def linear(num_classes):
    """Small and smooth, for tests that must be fast: 650 weights."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))


def normalized(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, num_classes))


class _Noisy(nn.Module):
    """Dropout in training and evaluation mode."""

    def forward(self, x):
        return dropout(x, 0.5)


def noisy(num_classes):
    return nn.Sequential(nn.Flatten(), _Noisy(), nn.Linear(64, num_classes))


class _WithFrozenAndUnused(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.used = nn.Linear(64, num_classes)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.used(torch.tanh(self.frozen(x.flatten(1))))


def with_frozen_and_unused(num_classes):
    return _WithFrozenAndUnused(num_classes)
