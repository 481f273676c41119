"""ExtrapolatedSAM: one pass at w + k (w - w_before). Equation and resumed runs: test_variants.py."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.nn import functional as F

import sparsesam
from tests import cases, oracles


def made(ahead=5.0, steps=0, **options):
    """A model and its optimizer after some steps."""
    model = cases.mlp()
    opt = sparsesam.ExtrapolatedSAM(cases.sgd(model), model, ahead / 200, **options)
    cases.train(model, opt, range(steps))
    return model, opt


def one_pass(opt, model):
    """The weights at w + e in a step of two phases."""
    opt.zero_grad()
    with opt.perturbed():
        F.cross_entropy(model(cases.vectors()[0]), cases.vectors()[1]).backward()
        ahead = cases.weights_of(model)
    opt.step()
    return ahead


# ---- where the gradient is taken ---------------------------------------------------------------------------------


def test_adaptive_groups_do_not_change_the_way_ahead():
    model, twin = cases.mlp(), cases.mlp()
    groups = [{"params": twin.parameters(), "adaptive": True}]
    for trained, params in ((model, model.parameters()), (twin, groups)):
        base = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        cases.train(trained, sparsesam.ExtrapolatedSAM(base, trained, 0.025), range(4))
    assert cases.same_state(model, twin)


def test_norm_of_the_last_update():
    model, opt = made()
    assert opt.last_update_norm is None
    before = oracles.flat(cases.weights_of(model))
    cases.train(model, opt, range(1))
    assert opt.last_update_norm == pytest.approx(float((oracles.flat(cases.weights_of(model)) - before).norm()))


# ---- updates that do not count -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, sparsesam.fixed_mask(cases.half_masks(cases.mlp()))], ids=["all", "half"])
def test_error_restores_weights_and_next_step_is_plain(mask):
    model, opt = made(50.0, steps=2, mask=mask)
    here = cases.weights_of(model)
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda: 1 / 0)
    assert cases.same_bits(cases.weights_of(model), here)
    assert cases.same_bits(one_pass(opt, model), here)
    here = cases.weights_of(model)
    assert not cases.same_bits(one_pass(opt, model), here)


def test_loaded_weights_do_not_count_as_update():
    model, opt = made(50.0, steps=2)
    ways_back = [entries["sparsesam_back"].clone() for entries in opt.state_dict()["state"].values()]
    model.load_state_dict(cases.mlp(seed=7).state_dict())
    expected = [w - 50.0 * back for w, back in zip(cases.weights_of(model), ways_back, strict=True)]
    torch.testing.assert_close(one_pass(opt, model), expected, rtol=1e-12, atol=1e-12)


def test_step_skipped_by_scaler_is_followed_by_plain_step():
    model = cases.mlp(torch.float32)
    opt = sparsesam.ExtrapolatedSAM(cases.sgd(model), model, 0.025)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    x, y = cases.vectors(dtype=torch.float32)
    for factor in (1.0, 1.0, torch.inf):
        opt.minimize(lambda factor=factor: F.cross_entropy(model(x), y) * factor, scaler=scaler)
        scaler.update()
    here = cases.weights_of(model)
    with opt.perturbed():
        assert cases.same_bits(cases.weights_of(model), here)


@pytest.mark.parametrize("mask", [None, sparsesam.random_mask(sparsity=0.5)], ids=["all", "half"])
def test_update_before_freezing_is_discarded(mask):
    model, opt = made(steps=1, mask=mask)
    model[0].weight.requires_grad_(False)
    opt.state_dict()
    cases.train(model, opt, range(1))
    model[0].weight.requires_grad_(True)
    before = model[0].weight.detach().clone()
    assert torch.equal(one_pass(opt, model)[0], before)


# ---- its state ---------------------------------------------------------------------------------------------------


def test_cleared_gradient_is_not_kept():
    model, opt = made(steps=1)
    kept = [weakref.ref(parameter.grad) for parameter in model.parameters()]
    opt.zero_grad()
    assert all(gradient() is None for gradient in kept)


def test_a_new_mask_is_perturbed_along_the_last_update():
    model, opt = made(steps=2, mask=sparsesam.random_mask(sparsity=0.5))
    before = cases.weights_of(model)
    cases.train(model, opt, [2])
    here, first = cases.weights_of(model), opt.masks
    opt.refresh_mask()
    ahead, second = one_pass(opt, model), opt.masks
    for name, w, old, moved in zip(first, here, before, ahead, strict=True):
        torch.testing.assert_close(moved, w + 5.0 * second[name] * (w - old), rtol=1e-9, atol=1e-12)
    assert not cases.same_bits(first.values(), second.values())


@pytest.mark.parametrize("then", [lambda _: None, lambda opt: opt.state_dict(), lambda opt: opt.refresh_mask()])
@pytest.mark.parametrize("pattern", ["unstructured", "filter"])
def test_change_of_dtype(pattern, then):
    model = cases.mlp(torch.float32)
    mask = sparsesam.random_mask(sparsity=0.5, pattern=pattern)
    opt = sparsesam.ExtrapolatedSAM(cases.sgd(model, momentum=0), model, 0.015, mask=mask)
    cases.train(model, opt, range(1), dtype=torch.float32)
    model.double()
    then(opt)
    cases.train(model, opt, range(2))
    assert opt.steps == 3
