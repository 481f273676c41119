"""The memory that activations take."""

from __future__ import annotations

import torch
from torch import nn

from sparsesam.utils.memory import SavedBytes


def test_saved_bytes_are_those_of_activations():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    saved = SavedBytes([*model.parameters(), x])
    with saved.counted():
        out = model(x)
    out.sum().backward()
    assert saved.total == 4 * 8 * 8  # tanh's output, which the next layer takes as its input
