"""ExtrapolatedSAM: one pass at w + k (w - w_before), with every base, mask and loop."""

from __future__ import annotations

import copy
import io
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from tests import cases, oracles

MASKS = {
    "unstructured": lambda model: sparsesam.fixed_mask(cases.half_masks(model)),
}


def steps_of(model, opt, steps):
    for seed in steps:
        opt.step(cases.closure_for(model, opt, *cases.vectors(seed=seed)))


def test_steps_ahead_follow_schedule():
    model, twin = cases.mlp(), cases.mlp()
    opt = sparsesam.ExtrapolatedSAM(cases.sgd(model), model, 4.0, schedule=sparsesam.Warmup(4))
    steps_of(model, opt, range(6))
    naive = oracles.Naive(twin, cases.sgd(twin), None, "masked")
    before = naive.w
    for seed in range(6):
        naive.x, naive.y = cases.vectors(seed=seed)
        here = naive.w
        naive.update(naive.gradient(here + 4.0 * min(1.0, (seed + 1) / 4) * (here - before)))
        before = here
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(twin), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{"steps_ahead": 0.0}, {"mask": sparsesam.random_mask(sparsity=1.0)}])
def test_without_extrapolation_equals_base_optimizer(options):
    model, twin = cases.convnet(), cases.convnet()
    opt, base = sparsesam.ExtrapolatedSAM(cases.sgd(model), model, **options), cases.sgd(twin)
    for seed in range(4):
        opt.step(cases.closure_for(model, opt, *cases.images(seed=seed)))
        base.step(cases.closure_for(twin, base, *cases.images(seed=seed)))
    assert cases.same_bits(model.state_dict().values(), twin.state_dict().values())


def test_one_step_ahead_of_heavy_ball_is_nesterov():
    """w + mu (w - w_before) is where Nesterov's method takes its gradient."""
    model = cases.mlp()
    opt = sparsesam.ExtrapolatedSAM(cases.sgd(model, lr=0.1, momentum=0.9), model, 0.9)
    weights = cases.weights_of(model)
    before, velocity = weights, [torch.zeros_like(w) for w in weights]
    for seed in range(5):
        x, y = cases.vectors(seed=seed)
        ahead = [w + 0.9 * (w - old) for w, old in zip(weights, before, strict=True)]
        leaves = [a.clone().requires_grad_() for a in ahead]
        named = dict(zip(dict(model.named_parameters()), leaves, strict=True))
        gradients = torch.autograd.grad(F.cross_entropy(torch.func.functional_call(model, named, (x,)), y), leaves)
        velocity = [0.9 * v + g for v, g in zip(velocity, gradients, strict=True)]
        before, weights = weights, [w - 0.1 * v for w, v in zip(weights, velocity, strict=True)]
        opt.step(cases.closure_for(model, opt, x, y))
    torch.testing.assert_close(cases.weights_of(model), weights, rtol=1e-9, atol=1e-12)


def test_closure_runs_once_and_weights_are_restored_bitwise():
    model = cases.convnet()
    opt = sparsesam.ExtrapolatedSAM(cases.sgd(model), model, 50.0)
    for seed in range(3):
        calls, here = [], cases.weights_of(model)
        closure = cases.closure_for(model, opt, *cases.images(seed=seed))

        def counted(closure=closure, calls=calls):
            calls.append(cases.weights_of(model))
            return closure()

        seen = []
        handle = opt.base.register_step_pre_hook(lambda *_: seen.append(cases.weights_of(model)))  # noqa: B023
        opt.step(counted)
        handle.remove()
        assert len(calls) == 1
        assert cases.same_bits(seen[0], here)
        assert cases.same_bits(calls[0], here) == (seed == 0)


@pytest.mark.parametrize("mask", [None, "unstructured"])
def test_error_restores_weights_and_next_step_is_plain(mask):
    model = cases.mlp()
    rule = None if mask is None else MASKS[mask](model)
    opt = sparsesam.ExtrapolatedSAM(cases.sgd(model), model, 50.0, mask=rule)
    steps_of(model, opt, range(2))
    here = cases.weights_of(model)
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda: 1 / 0)
    assert cases.same_bits(cases.weights_of(model), here)
    with opt.perturbed():
        assert cases.same_bits(cases.weights_of(model), here)
        F.cross_entropy(model(cases.vectors()[0]), cases.vectors()[1]).backward()
    opt.step()
    with opt.perturbed():
        moved = cases.weights_of(model)
    assert not cases.same_bits(moved, cases.weights_of(model))


def test_loaded_weights_do_not_count_as_update():
    model = cases.mlp()
    opt = sparsesam.ExtrapolatedSAM(cases.sgd(model), model, 50.0)
    steps_of(model, opt, range(2))
    ways_back = [entries["sparsesam_back"].clone() for entries in opt.state_dict()["state"].values()]
    model.load_state_dict(cases.mlp(seed=7).state_dict())
    here = cases.weights_of(model)
    with opt.perturbed():
        there = cases.weights_of(model)
        F.cross_entropy(model(cases.vectors()[0]), cases.vectors()[1]).backward()
    expected = [w - 50.0 * back for w, back in zip(here, ways_back, strict=True)]
    torch.testing.assert_close(there, expected, rtol=1e-12, atol=1e-12)


def test_two_phases_take_one_pass_and_equal_closure():
    model, twin = cases.convnet(), cases.convnet()
    opt = sparsesam.ExtrapolatedSAM(cases.sgd(model), model, 5.0)
    other = sparsesam.ExtrapolatedSAM(cases.sgd(twin), twin, 5.0)
    for seed in range(4):
        x, y = cases.images(seed=seed)
        assert not opt.needs_first_pass
        with opt.perturbed():
            F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        other.step(cases.closure_for(twin, other, x, y))
    assert cases.same_bits(model.state_dict().values(), twin.state_dict().values())


def test_closure_adding_to_older_gradients_raises():
    model = cases.mlp()
    opt = sparsesam.ExtrapolatedSAM(cases.sgd(model), model, 5.0)
    x, y = cases.vectors()
    for _ in range(2):
        opt.step(cases.closure_for(model, opt, x, y))
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()  # an earlier micro-batch, at w

    def closure():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    here = cases.weights_of(model)
    with pytest.raises(RuntimeError, match="accumulated into existing gradients"):
        opt.step(closure)
    assert cases.same_bits(here, cases.weights_of(model))


def test_cleared_gradient_is_not_kept():
    model = cases.mlp()
    opt = sparsesam.ExtrapolatedSAM(cases.sgd(model), model, 5.0)
    opt.step(cases.closure_for(model, opt, *cases.vectors()))
    kept = [weakref.ref(parameter.grad) for parameter in model.parameters()]
    opt.zero_grad()
    assert all(gradient() is None for gradient in kept)


def test_state_covers_perturbed_entries_only():
    model = nn.Linear(6, 8, bias=False)
    rule = sparsesam.fixed_mask({"weight": torch.arange(48).view(8, 6) % 4 == 0})
    opt = sparsesam.ExtrapolatedSAM(cases.sgd(model), model, 5.0, mask=rule)
    opt.minimize(lambda: model(torch.randn(2, 6)).square().sum())
    assert {name: back.numel() for name, back in opt.own.tensors["back"].items()} == {"weight": 12}


RULES = {
    "none": lambda: None,
    "fisher": lambda: sparsesam.fisher_mask(cases.vectors(32), F.cross_entropy, sparsity=0.5, samples=8, refresh=2),
    "dynamic": lambda: sparsesam.dynamic_mask(sparsity=0.5, refresh=2),
    "momentum": lambda: sparsesam.Mask(score=sparsesam.GradientMagnitude(), sparsity=0.5, refresh=2),
    "filters": lambda: sparsesam.random_mask(sparsity=0.5, pattern="filter", refresh=3),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("at", [1, 4, 5])
def test_resumed_run_equals_uninterrupted(rule, at):
    def make(model):
        return sparsesam.ExtrapolatedSAM(cases.sgd(model), model, 4.0, mask=RULES[rule]())

    model = cases.mlp()
    opt = make(model)
    steps_of(model, opt, range(at))
    file = io.BytesIO()
    torch.save((model.state_dict(), opt.state_dict()), file)
    copied = copy.deepcopy((model, opt))
    steps_of(model, opt, range(at, 9))
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    again = cases.mlp(seed=5)
    again.load_state_dict(weights)
    resumed = make(again)
    resumed.load_state_dict(state)
    steps_of(again, resumed, range(at, 9))
    steps_of(*copied, range(at, 9))
    assert cases.same_bits(cases.weights_of(model), cases.weights_of(again))
    assert cases.same_bits(cases.weights_of(model), cases.weights_of(copied[0]))


def test_entries_of_both_masks_survive_refresh():
    model = cases.mlp()
    opt = sparsesam.ExtrapolatedSAM(cases.sgd(model), model, 5.0, mask=sparsesam.random_mask(sparsity=0.5))
    steps_of(model, opt, range(2))
    before = cases.weights_of(model)
    steps_of(model, opt, [2])
    here, first = cases.weights_of(model), opt.masks
    opt.refresh_mask()
    with opt.perturbed():
        there = cases.weights_of(model)
        F.cross_entropy(model(cases.vectors()[0]), cases.vectors()[1]).backward()
    for w, old, moved, (name, second) in zip(here, before, there, opt.masks.items(), strict=True):
        both = first[name] & second
        torch.testing.assert_close(moved, w + 5.0 * both * (w - old), rtol=1e-9, atol=1e-12)
    assert not all(torch.equal(first[name], second) for name, second in opt.masks.items())


def test_step_skipped_by_scaler_is_followed_by_plain_step():
    model = cases.mlp(torch.float32)
    opt = sparsesam.ExtrapolatedSAM(cases.sgd(model), model, 5.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    x, y = cases.vectors(dtype=torch.float32)
    for factor in (1.0, 1.0, float("inf")):
        closure = cases.closure_for(
            model, opt, x, y, backward=lambda loss, factor=factor: scaler.scale(loss * factor).backward()
        )
        opt.step(closure, scaler=scaler)
        scaler.update()
    here = cases.weights_of(model)
    with opt.perturbed():
        assert cases.same_bits(cases.weights_of(model), here)
        F.cross_entropy(model(x), y).backward()


def test_start_and_every():
    model = cases.mlp()
    opt = sparsesam.ExtrapolatedSAM(cases.sgd(model), model, 5.0, start=3, every=2)
    moved = []
    for seed in range(8):
        here, seen = cases.weights_of(model), []
        closure = cases.closure_for(model, opt, *cases.vectors(seed=seed))
        opt.step(lambda closure=closure, seen=seen: (seen.append(cases.weights_of(model)), closure())[1])
        moved.append(not cases.same_bits(here, seen[0]))
    assert moved == [False, False, False, True, False, True, False, True]


def test_statistics_update_once_per_step():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    opt = sparsesam.ExtrapolatedSAM(cases.sgd(model), model, 5.0)
    steps_of(model, opt, range(3))
    assert model[1].num_batches_tracked == 3


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "60"])
def test_invalid_steps_ahead_raise(value):
    model = cases.mlp()
    with pytest.raises(ValueError, match="steps_ahead must be a finite number"):
        sparsesam.ExtrapolatedSAM(cases.sgd(model), model, value)


def test_gradient_mask_needs_base_with_momentum():
    model = cases.mlp()
    base = torch.optim.Adagrad(model.parameters())
    opt = sparsesam.ExtrapolatedSAM(base, model, 5.0, mask=RULES["momentum"]())
    with pytest.raises(ValueError, match="base must have a momentum"):
        steps_of(model, opt, range(2))
    with pytest.raises(ValueError, match="base must have a momentum, got SGD with momentum=0"):
        sparsesam.ExtrapolatedSAM(cases.sgd(model, momentum=0), model, 5.0, mask=RULES["momentum"]())


@pytest.mark.parametrize("mask", [None, sparsesam.random_mask(sparsity=0.5)], ids=["all", "half"])
def test_update_before_freezing_is_discarded(mask):
    model = cases.mlp()
    opt = sparsesam.ExtrapolatedSAM(cases.sgd(model), model, mask=mask)
    x, y = cases.vectors()
    opt.step(cases.closure_for(model, opt, x, y))
    model[0].weight.requires_grad_(False)
    opt.state_dict()
    opt.step(cases.closure_for(model, opt, x, y))
    model[0].weight.requires_grad_(True)
    before = model[0].weight.detach().clone()
    with opt.perturbed():
        assert torch.equal(model[0].weight, before)
        F.cross_entropy(model(x), y).backward()
    opt.step()
