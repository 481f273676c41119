"""The number of samples that are measured at a time follows free memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from sparsesam.masks import fisher
from sparsesam.masks.fisher import fisher_diagonal
from sparsesam.utils.memory import SavedBytes, fitting, free_bytes
from tests import cases


def test_chunk_fills_half_of_free_memory():
    assert fitting(128, 10, 128 * 10 * 2) == 128
    assert fitting(128, 10, 128 * 10 * 2 - 2) == 64
    assert fitting(128, 10, 100) == 4
    assert fitting(128, 10, 0) == 1
    assert fitting(128, 10, None) == 128


def test_free_memory_is_known():
    assert free_bytes(torch.device("cpu")) > 2**20
    assert free_bytes(torch.device("meta")) is None


def test_saved_bytes_are_those_of_activations():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    saved = SavedBytes([*model.parameters(), x])
    with saved.counted():
        out = model(x)
    out.sum().backward()
    assert saved.total == 4 * 8 * 8  # tanh's output, which the next layer takes as its input


class Sizes(nn.Module):
    """Records the sizes of the batches that it sees."""

    def __init__(self):
        super().__init__()
        self.inner = cases.convnet(torch.float64)
        self.sizes = []

    def forward(self, x):
        self.sizes.append(len(x))
        return self.inner(x)


@pytest.mark.parametrize(("chunk", "expected"), [(None, [16]), (5, [5, 5, 5, 1]), (16, [16]), (100, [16])])
def test_given_chunk_is_used_and_changes_nothing(chunk, expected):
    model = Sizes()
    x, y = cases.images(16, torch.float64)
    whole = fisher_diagonal(model, [(x, y)], F.cross_entropy)
    model.sizes.clear()
    found = fisher_diagonal(model, [(x, y)], F.cross_entropy, chunk=chunk)
    assert model.sizes[3:] == expected  # after two samples alone, and both at once
    assert found.samples == 16
    torch.testing.assert_close(found.values, whole.values)


def test_low_memory_reduces_chunk(monkeypatch):
    model = Sizes()
    x, y = cases.images(16, torch.float64)
    whole = fisher_diagonal(model, [(x, y)], F.cross_entropy)
    model.sizes.clear()
    monkeypatch.setattr(fisher, "free_bytes", lambda device: 200_000)
    found = fisher_diagonal(model, [(x, y)], F.cross_entropy)
    assert model.sizes[3:] == [4, 4, 4, 4]
    torch.testing.assert_close(found.values, whole.values)


def test_chunk_is_passed_from_mask_to_measurement():
    model = Sizes()
    data = cases.images(16, torch.float64)
    mask = sparsesam.fisher_mask(data, F.cross_entropy, sparsity=0.5, samples=16, chunk=8)
    opt = sparsesam.SSAM(cases.sgd(model), model, mask=mask)
    opt.step(cases.closure_for(model, opt, *data))
    assert model.sizes[3:5] == [8, 8]


@pytest.mark.parametrize("chunk", [0, -1])
def test_chunk_below_one_raises(chunk):
    with pytest.raises(ValueError, match="chunk must be an integer of at least 1"):
        sparsesam.fisher_mask(cases.images(), F.cross_entropy, sparsity=0.5, chunk=chunk)
