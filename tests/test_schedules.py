"""Schedules of rho, and rho set by the user."""

from __future__ import annotations

import copy

import pytest
import torch

import sparsesam
from tests import cases, oracles


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (sparsesam.Warmup(2), [0.5, 1, 1]),
        (sparsesam.Cosine(2, final=0.5), [1, 0.75, 0.5, 0.5]),
        (sparsesam.InverseSqrt(), [1, 2**-0.5, 3**-0.5, 0.5]),
    ],
)
def test_rho_schedules_start_from_rho_of_each_group(schedule, factors):
    model = cases.mlp()
    groups = [{"params": model[0].parameters(), "rho": 0.4}, {"params": model[2:].parameters()}]
    opt = sparsesam.SAM(torch.optim.SGD(groups, lr=0.1), model, rho=0.1, rho_schedule=schedule)
    x, y = cases.vectors()
    for factor in factors:
        opt.step(cases.closure_for(model, opt, x, y))
        assert [group["rho"] for group in opt.param_groups] == pytest.approx([0.4 * factor, 0.1 * factor])


def test_rho_of_groups_can_be_set_from_outside():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.1)
    opt.param_groups[0]["rho"] = 0.7
    e = cases.perturbation_of(opt, model, *cases.vectors())
    assert oracles.flat(e).norm().item() == pytest.approx(0.7)


def test_rho_follows_the_learning_rate():
    model = cases.mlp()
    base = cases.sgd(model, lr=0.2)
    follow = sparsesam.FollowLearningRate(base, max_lr=0.2, min_lr=0.1, final=0.5)
    opt = sparsesam.GSAM(base, model, rho=0.4, rho_schedule=follow)
    found = []
    for seed, rate in enumerate((0.2, 0.15, 0.1, 0.05)):
        base.param_groups[0]["lr"] = rate
        opt.step(cases.closure_for(model, opt, *cases.vectors(seed=seed)))
        found.append(opt.param_groups[0]["rho"])
    assert found == pytest.approx([0.4, 0.3, 0.2, 0.2])


def test_copy_follows_the_learning_rate_of_its_own_base():
    model = cases.mlp()
    base = cases.sgd(model, lr=0.2)
    opt = sparsesam.SAM(base, model, rho=0.4, rho_schedule=sparsesam.FollowLearningRate(base, max_lr=0.2))
    twin, other = copy.deepcopy((model, opt))
    base.param_groups[0]["lr"] = 0.1
    opt.step(cases.closure_for(model, opt, *cases.vectors()))
    other.step(cases.closure_for(twin, other, *cases.vectors()))
    assert opt.param_groups[0]["rho"] == pytest.approx(0.2)
    assert other.param_groups[0]["rho"] == pytest.approx(0.4)


@pytest.mark.parametrize("options", [{"max_lr": 0.0}, {"max_lr": 0.1, "min_lr": 0.1}])
def test_invalid_range_of_learning_rates_raises(options):
    with pytest.raises(ValueError, match="must be"):
        sparsesam.FollowLearningRate(cases.sgd(cases.mlp()), **options)
