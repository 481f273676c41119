from collections import OrderedDict

import torch
from benchmarks.methods import METHODS, cases
from torch import nn


def test_every_case_takes_steps():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 4, 3, stride=8), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    steps = cases(2, nn.Sequential(OrderedDict(layer4=body, fc=nn.Linear(64, 10))))
    assert METHODS.keys() < steps.keys()
    for step in steps.values():
        step()
