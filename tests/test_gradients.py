"""Gradients that exist before a pass, are missing, not finite, or belong to no parameter of the optimizer."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from tests import cases

# ---- what a pass did to older gradients --------------------------------------------------------------------------


def uncleared(model, x, y):
    """A closure that does not clear the gradients."""

    def closure():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("reached", [slice(None), slice(3)], ids=["all", "not the last layer"])
@pytest.mark.parametrize("kind", [sparsesam.SAM, sparsesam.ExtrapolatedSAM])
def test_closure_adding_to_older_gradients_raises(kind, reached):
    model, opt = cases.made(kind)
    closure = uncleared(model, *cases.vectors())
    opt.step(closure)  # there are none before the first step
    before = cases.weights_of(model)
    with pytest.raises(RuntimeError, match=r"accumulated into existing gradients.*Clear them in the closure"):
        opt.step(uncleared(model[reached], *cases.vectors()))
    assert cases.same_bits(before, cases.weights_of(model))
    opt.zero_grad(set_to_none=False)
    opt.step(closure)  # zeros count as none
    assert opt.steps == 2


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("by", ["wrapper", "base", "model"])
def test_every_way_to_clear_gradients_in_closure_is_accepted(by, to_none):
    model, opt = cases.made(sparsesam.SAM)
    clear, backward = (
        {"wrapper": opt, "base": opt.base, "model": model}[by].zero_grad,
        uncleared(model, *cases.vectors()),
    )
    for _ in range(3):
        opt.step(lambda: (clear(set_to_none=to_none), backward())[1])
    assert opt.steps == 3


@pytest.mark.parametrize("in_place", [True, False])
def test_closure_may_assign_gradients(in_place):
    model, opt = cases.made(sparsesam.SAM)

    def closure():
        for p, gradient in zip(model.parameters(), cases.gradients_of(model, *cases.vectors()), strict=True):
            if in_place and p.grad is not None:
                p.grad.copy_(gradient)
            else:
                p.grad = gradient

    for _ in range(3):
        opt.step(closure)
    assert opt.steps == 3


@pytest.mark.parametrize("to_none", [True, False])
def test_second_gradient_may_be_cleared_instead_of_used(to_none):
    model, opt = cases.made(sparsesam.SAM)
    for _ in range(3):
        model.zero_grad(set_to_none=to_none)
        uncleared(model, *cases.vectors())()
        with opt.perturbed():
            uncleared(model, *cases.vectors())()
    model[0].weight.square().sum().backward()  # a penalty at w, added to the gradient at w + e
    opt.step()
    assert opt.steps == 1


def test_first_pass_adding_to_an_unused_second_gradient_raises():
    model, opt = cases.made(sparsesam.SAM)
    cases.both_passes(opt, model, *cases.vectors())
    uncleared(model, *cases.vectors())()
    with pytest.raises(RuntimeError, match=r"which no step\(\) has used"), opt.perturbed():
        pass


def test_abandoned_step_does_not_make_the_next_one_plain():
    model, opt = cases.made(sparsesam.SAM)
    cases.both_passes(opt, model, *cases.vectors())
    opt.zero_grad()  # the user abandons this step
    uncleared(model, *cases.vectors())()
    with pytest.raises(RuntimeError, match=r"step\(\) needs a gradient at w \+ e"):
        opt.step()


# ---- missing -----------------------------------------------------------------------------------------------------


def test_closure_without_gradients_raises_in_the_first_step():
    model, opt = cases.made(sparsesam.SAM)
    before, closure = cases.weights_of(model), cases.closure_for(model, opt, *cases.vectors())
    with pytest.raises(RuntimeError, match="first pass made no gradients"):
        opt.step(lambda: torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="second pass made no gradients"):
        opt.step(lambda: torch.tensor(1.0) if opt.in_second_pass else closure())
    assert cases.same_bits(before, cases.weights_of(model))


@pytest.mark.parametrize("clears", [True, False])
def test_closure_without_backward_is_later_skipped_and_not_counted(clears):
    """As in the last epoch of Lightning's StochasticWeightAveraging."""
    model, opt = cases.made(sparsesam.SAM, rho=0.1)
    cases.train(model, opt, range(1))
    before, calls = cases.weights_of(model), []

    def closure():
        calls.append(opt.zero_grad() if clears else None)
        return F.cross_entropy(model(cases.vectors()[0]), cases.vectors()[1])

    with pytest.warns(RuntimeWarning, match="computed no gradient"):
        opt.step(closure)
    assert cases.same_bits(before, cases.weights_of(model))
    assert (len(calls), opt.steps, opt.skipped_steps) == (1, 1, 1)


class Sometimes(nn.Module):
    """One branch in the first pass, another in the second, a third never."""

    def __init__(self):
        super().__init__()
        self.always, self.first, self.second, self.never = (nn.Linear(6, 3) for _ in range(4))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.always(x) + (self.first(x) if self.calls % 2 else self.second(x))


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_parameters_without_gradient_in_one_or_both_passes(sparsity):
    model = Sometimes()
    mask = sparsesam.random_mask(sparsity=sparsity)
    opt = sparsesam.SSAM(cases.sgd(model, momentum=0), model, rho=0.5, mask=mask)
    before = copy.deepcopy(model.state_dict())
    cases.train(model, opt, range(1), dtype=torch.float32)
    changed = {name.split(".")[0] for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"always", "second"}


# ---- zero or not finite ------------------------------------------------------------------------------------------


def scaled_closure(model, opt, x, y, factors):
    factors = iter(factors)
    return cases.closure_of(opt, lambda: F.cross_entropy(model(x), y) * next(factors))


def half_masked(model):
    return cases.ssam(model, cases.half_masks(model), rho=0.1)


@pytest.mark.filterwarnings("error", "ignore:the ascent gradient's norm")
@pytest.mark.parametrize(("factor", "skipped_steps"), [(0.0, 0), (torch.nan, 1)])
def test_two_gradients_that_are_zero_or_not_finite_leave_weights_unchanged(factor, skipped_steps):
    model = cases.mlp()
    opt, before = half_masked(model), cases.weights_of(model)
    with pytest.warns(RuntimeWarning, match="skipped_steps") if skipped_steps else nullcontext():
        opt.step(scaled_closure(model, opt, *cases.vectors(), [factor, factor]))
    assert cases.same_bits(before, cases.weights_of(model))
    assert (opt.skipped_ascents, opt.skipped_steps, opt.steps) == (1, skipped_steps, 1)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_ascent_gradient_means_no_perturbation(bad):
    model, twin = cases.mlp(), cases.mlp()
    opt = half_masked(model)
    with pytest.warns(RuntimeWarning, match="skipped_ascents"):
        opt.step(scaled_closure(model, opt, *cases.vectors(seed=0), [bad, 1.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warns once
        opt.step(scaled_closure(model, opt, *cases.vectors(seed=1), [bad, 1.0]))
    cases.train(twin, cases.sgd(twin), (0, 1))
    assert cases.same_bits(cases.weights_of(model), cases.weights_of(twin))
    assert (opt.skipped_ascents, opt.skipped_steps) == (2, 0)


# ---- outside of the optimizer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize("clears", ["before the step", "in the first pass", "never"])
@pytest.mark.parametrize("way", cases.WAYS)
def test_gradients_outside_the_optimizer_are_those_of_the_second_pass(way, clears, engine):
    """As if there were one pass, at w + e; what the user accumulates there is kept."""
    model, x, y = cases.mlp(), *cases.vectors()
    base = torch.optim.SGD(model[2:].parameters(), lr=0.1)
    opt = sparsesam.SSAM(base, model, rho=0.5, mask=sparsesam.fixed_mask("4.*"), norm="masked", engine=engine)
    outside, seen = model[0].weight, []

    def loss_of():
        if clears == "in the first pass" and not opt.in_second_pass:
            model[0].zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        if opt.in_second_pass:
            seen.append(torch.autograd.grad(loss, outside, retain_graph=True)[0])
        return loss

    outside.grad, expected = torch.ones_like(outside), torch.ones_like(outside)
    for _ in range(3):
        if clears == "before the step":
            model[0].zero_grad()
        cases.WAYS[way](opt, loss_of)
        expected = expected + seen[-1] if clears == "never" else seen[-1]
        torch.testing.assert_close(outside.grad, expected, rtol=1e-12, atol=1e-12)
    assert (opt.savings().reused > 0) is engine
