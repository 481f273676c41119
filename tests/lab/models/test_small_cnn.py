import torch
from torch import nn

from sparsesam.lab.models import small_cnn


def test_maps_digits_to_class_scores():
    assert small_cnn(7)(torch.zeros(5, 1, 8, 8)).shape == (5, 7)


def test_takes_other_channels_and_sizes():
    assert small_cnn(in_channels=3)(torch.zeros(2, 3, 16, 16)).shape == (2, 10)


def test_has_three_normalized_convolutions():
    kinds = [type(module) for module in small_cnn()]
    assert kinds.count(nn.Conv2d) == kinds.count(nn.BatchNorm2d) == 3
