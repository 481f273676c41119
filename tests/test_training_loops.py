"""Training loops that users write: precision, micro-batches, clipping, batches for a mask."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from tests import cases, oracles

# ---- precision ---------------------------------------------------------------------------------------------------


def half_masked(model):
    return cases.ssam(model, cases.half_masks(model), rho=0.1)


def combining(model):
    return sparsesam.GSAM(cases.sgd(model), model, 0.1)


def scaled():
    return torch.amp.GradScaler("cpu", init_scale=2.0**10)


def by_minimize(opt, model, x, y, scaler):
    opt.minimize(lambda: F.cross_entropy(model(x), y), scaler=scaler)


def with_closure(opt, model, x, y, scaler):
    opt.step(cases.closure_for(model, opt, x, y, backward=lambda loss: scaler.scale(loss).backward()), scaler=scaler)


def in_two_phases(opt, model, x, y, scaler):
    opt.zero_grad()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    with opt.perturbed():
        scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(opt)


WAYS = [by_minimize, with_closure, in_two_phases]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [half_masked, combining])
def test_grad_scaler_changes_only_rounding(make, way):
    model, twin, scaler, norms = cases.convnet(), cases.convnet(), scaled(), []
    opt, other = make(model), make(twin)
    for each, of in ((opt, model), (other, twin)):
        each.base.register_step_pre_hook(lambda *_, of=of: norms.append(of[4].weight.grad.norm().item()))
    for seed in range(4):
        x, y = cases.images(seed=seed)
        way(opt, model, x, y, scaler)
        scaler.update()
        cases.with_closure(other, twin, x, y)
    assert opt.steps == 4
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)  # gradients are unscaled before the update
    cases.assert_close(model, twin, rtol=1e-4, atol=1e-6)


class Overflowing(nn.Sequential):
    """Its output is infinite in some of its calls, counted from 1."""

    calls, bad = 0, ()

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (torch.inf if self.calls in self.bad else 1.0)


@pytest.mark.filterwarnings("ignore:the ascent gradient's norm:RuntimeWarning")
@pytest.mark.parametrize("bad", [(2,), (1, 2)], ids=["second pass", "both passes"])
@pytest.mark.parametrize("way", WAYS)
def test_step_skipped_by_scaler_leaves_weights_and_count_unchanged(way, bad):
    model, scaler = Overflowing(*cases.mlp(torch.float32)), scaled()
    model.bad = bad
    opt, before = half_masked(model), cases.weights_of(model)
    x, y = cases.vectors(dtype=torch.float32)
    way(opt, model, x, y, scaler)
    scaler.update()
    assert cases.same_bits(before, cases.weights_of(model))
    assert (opt.steps, scaler.get_scale()) == (0, 2.0**9)
    assert opt.skipped_ascents == (1 in bad)
    way(opt, model, x, y, scaler)
    assert opt.steps == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_steps_and_in_their_passes_is_the_same(dtype):
    """Around steps, its cache would keep weights from before they are moved."""
    results = []
    for is_around in (True, False):
        model, (x, y) = cases.convnet(), cases.images()
        opt = half_masked(model)

        def loss_of(model=model, x=x, y=y):
            with torch.autocast("cpu", dtype=dtype):
                return F.cross_entropy(model(x), y)

        with torch.autocast("cpu", dtype=dtype) if is_around else nullcontext():
            for _ in range(3):
                opt.minimize(loss_of)
        results.append(cases.weights_of(model))
    assert cases.same_bits(*results)


# ---- micro-batches, clipping, batches ----------------------------------------------------------------------------


def test_accumulation_over_micro_batches_equals_whole_batch():
    model, twin = cases.mlp(), cases.mlp()
    opt, other = half_masked(model), half_masked(twin)
    for seed in range(4):
        x, y = cases.vectors(seed=seed)
        cases.with_closure(other, twin, x, y)
        micro = zip(x.chunk(4), y.chunk(4), strict=True)
        cases.over_micro_batches(opt, [lambda a=a, b=b: F.cross_entropy(model(a), b) / 4 for a, b in micro])
    cases.assert_close(model, twin, rtol=1e-10)


def test_clipping_goes_between_second_pass_and_step():
    model, twin = cases.mlp(), cases.mlp()
    opt, other = (sparsesam.SAM(torch.optim.SGD(m.parameters(), lr=1.0), m, rho=0.1) for m in (model, twin))
    before = cases.weights_of(model)
    x, y = cases.vectors()
    clip = partial(nn.utils.clip_grad_norm_, model.parameters(), 1e-3)
    cases.over_micro_batches(opt, [lambda: F.cross_entropy(model(x), y)], then=clip)
    moved = oracles.flat(cases.weights_of(model)) - oracles.flat(before)
    assert moved.norm().item() == pytest.approx(1e-3, rel=1e-3)
    # The same with a closure: a hook on the base optimizer.
    other.base.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(twin.parameters(), 1e-3) and None)
    cases.with_closure(other, twin, x, y)
    cases.assert_close(model, twin)


@pytest.mark.parametrize("way", ["first_pass", "perturbed", "refresh_mask"])
def test_batch_for_a_mask_in_two_phases(way):
    """A mask that measures the current batch gets it from any of the three methods, as from step."""
    batch = cases.vectors()
    model, twin = cases.mlp(), cases.mlp()
    mask = sparsesam.fisher_mask(None, F.cross_entropy, sparsity=0.5)
    opt, other = (sparsesam.SSAM(cases.sgd(m), m, rho=0.3, mask=mask) for m in (model, twin))
    closure = cases.closure_for(model, opt, *batch)
    if way == "refresh_mask":
        opt.refresh_mask(now=True, batch=batch)
    if way == "perturbed":
        closure()
    else:
        with opt.first_pass(batch=batch if way == "first_pass" else None):
            closure()
    with opt.perturbed(batch=batch if way == "perturbed" else None):
        closure()
    opt.step()
    other.step(cases.closure_for(twin, other, *batch), batch=batch)
    assert opt.sparsity == pytest.approx(0.5, abs=0.01)
    assert cases.same_state(model, twin)
