"""recommended(): one call, by cost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparsesam
from tests import cases


@pytest.mark.parametrize(("cost", "passes"), [(1.0, 1), (1.05, 1), (1.25, 1.25), (2.0, 2), (3.0, 2)])
def test_step_takes_no_more_passes_than_cost_allows(cost, passes):
    model = cases.mlp()
    opt = sparsesam.recommended(cases.sgd(model), model, cost=cost)
    seen = []

    def closure(batch):
        x, y = batch
        seen.append(len(x))
        return cases.closure_for(model, opt, x, y)()

    for seed in range(3):
        seen.clear()
        opt.step(closure, batch=cases.vectors(16, seed=seed))
        assert sum(seen) / 16 == passes


def test_strength_is_that_of_chosen_method():
    model = cases.mlp()
    assert sparsesam.recommended(cases.sgd(model), model, strength=7.0).param_groups[0]["steps_ahead"] == 7.0
    assert sparsesam.recommended(cases.sgd(model), model, cost=2, strength=0.7).param_groups[0]["rho"] == 0.7


@pytest.mark.parametrize(
    ("layer", "steps"),
    [
        (nn.BatchNorm2d(4), 60),
        (nn.SyncBatchNorm(4), 60),
        (nn.GroupNorm(2, 4), 10),
        (nn.LayerNorm(4), 10),
        (nn.ReLU(), 10),
    ],
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_noisy_labels_look_further_ahead_with_batch_normalization(kind, layer, steps):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(layer))
    base = kind(model.parameters(), lr=0.1)
    assert sparsesam.recommended(base, model, noisy_labels=True).param_groups[0]["steps_ahead"] == steps
    assert sparsesam.recommended(base, model).param_groups[0]["steps_ahead"] == 10


@pytest.mark.parametrize("cost", [1.5, 2.0])
def test_noisy_labels_increase_rho(cost):
    model = cases.mlp()
    assert sparsesam.recommended(cases.sgd(model), model, cost=cost).param_groups[0]["rho"] == 0.05
    assert sparsesam.recommended(cases.sgd(model), model, cost=cost, noisy_labels=True).param_groups[0]["rho"] == 0.2


@pytest.mark.parametrize("cost", [0.5, -1.0, float("nan")])
def test_cost_below_base_raises(cost):
    model = cases.mlp()
    with pytest.raises(ValueError, match="cost must be at least 1"):
        sparsesam.recommended(cases.sgd(model), model, cost=cost)
