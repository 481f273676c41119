"""Momentum-SAM: one pass at w - rho v / ||v||, whatever the base, its mask and the norm."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import sparsesam
from tests import cases, oracles

BASES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
}


def naive_run(model, base, *, rho, masks, norm, sign, steps):
    """The equation, with copies of everything: gradient at w + sign * rho * m v / ||v||, step from w."""
    parameters = list(model.parameters())
    for seed in range(steps):
        x, y = cases.vectors(seed=seed)
        here = cases.weights_of(model)
        states = [base.state[p] for p in parameters]
        velocity = [s.get("momentum_buffer", s.get("exp_avg")) for s in states]
        if velocity[0] is not None:
            mask = oracles.flat([m.double() for m in masks])
            e = oracles.perturbation(oracles.flat(velocity), oracles.flat(here), mask, rho=rho, norm=norm)
            with torch.no_grad():
                for p, step in zip(parameters, oracles.unflat(e, parameters), strict=True):
                    p.add_(sign * step)
        base.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, old in zip(parameters, here, strict=True):
                p.copy_(old)
        base.step()


@pytest.mark.parametrize("norm", ["full", "masked"])
@pytest.mark.parametrize("base", BASES)
def test_equals_published_step(base, norm):
    model, twin = cases.mlp(), cases.mlp()
    masks = cases.half_masks(model)
    rule = sparsesam.fixed_mask(masks)
    opt = sparsesam.SSAM(BASES[base](model.parameters()), model, rho=0.7, mask=rule, norm=norm, ascent="momentum")
    for seed in range(5):
        opt.step(cases.closure_for(model, opt, *cases.vectors(seed=seed)))
    naive_run(twin, BASES[base](twin.parameters()), rho=0.7, masks=masks.values(), norm=norm, sign=-1, steps=5)
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(twin), rtol=1e-9, atol=1e-12)


def test_momentum_climbing_has_opposite_sign():
    model, twin = cases.mlp(), cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.7, ascent="momentum-climbing")
    for seed in range(5):
        opt.step(cases.closure_for(model, opt, *cases.vectors(seed=seed)))
    ones = [torch.ones_like(p) for p in model.parameters()]
    naive_run(twin, cases.sgd(twin), rho=0.7, masks=ones, norm="full", sign=1, steps=5)
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(twin), rtol=1e-9, atol=1e-12)


def test_base_with_momentum_zero_raises_at_construction():
    model = cases.mlp()
    with pytest.raises(ValueError, match="base must have a momentum, got SGD with momentum=0"):
        sparsesam.SAM(cases.sgd(model, momentum=0), model, ascent="momentum")


def test_base_without_momentum_state_raises_in_step():
    model = cases.mlp()
    opt = sparsesam.SAM(torch.optim.Adagrad(model.parameters()), model, ascent="momentum")
    with pytest.raises(ValueError, match="Adagrad keeps only step, sum"):
        opt.step(cases.closure_for(model, opt, *cases.vectors()))


@pytest.mark.parametrize("options", [{"ascent_fraction": 0.25}, {"off_steps": "reuse", "every": 2}])
def test_options_of_first_pass_raise(options):
    model = cases.mlp()
    with pytest.raises(ValueError, match="has no use with ascent='momentum'"):
        sparsesam.SAM(cases.sgd(model), model, ascent="momentum", **options)


def test_mask_scored_by_momentum_waits_for_it():
    model = cases.mlp()
    rule = sparsesam.Mask(score=sparsesam.GradientMagnitude(), sparsity=0.5, refresh=1)
    opt = sparsesam.SSAM(cases.sgd(model), model, rho=0.3, mask=rule, ascent="momentum")
    opt.step(cases.closure_for(model, opt, *cases.vectors()))
    assert opt.masks == {}
    momentum = oracles.flat([opt.state[p]["momentum_buffer"].clone() for p in model.parameters()]).abs()
    opt.step(cases.closure_for(model, opt, *cases.vectors(seed=2)))
    kept = oracles.flat(list(opt.masks.values()))
    assert momentum[kept].min() >= momentum[~kept].max()
