"""What a step leaves out, and says that it left out; what an implicit ascent needs. Only the cost changes."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sparsesam
from tests import cases

X = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b(self.a(x).relu())


def built(kind=TwoParts):
    torch.manual_seed(0)
    return kind().double()


def squares(model, x=X):
    return model(x).square().sum()


def half_of_rows(model):
    return sparsesam.fixed_mask(cases.every_other_filter(model))


# ---- what is reported --------------------------------------------------------------------------------------------


def test_savings_say_what_was_left_out():
    model = built()
    opt = cases.ssam(model, "b.*")
    assert "no step taken yet" in str(opt.savings())
    opt.minimize(lambda: squares(model))
    savings = opt.savings()
    assert savings.gradients == pytest.approx(20 / 30)
    assert 0 < savings.reused <= savings.operations
    assert "reads b.bias, which is perturbed" in savings.ended
    assert len(str(savings).splitlines()) == 3


def test_first_backward_computes_ascent_inputs_only():
    model = built()
    opt = cases.ssam(model, "b.*")
    assert opt.ascent_inputs is None
    with opt.first_pass():
        assert [id(p) for p in opt.ascent_inputs] == [id(p) for p in model.b.parameters()]
        opt.backward(squares(model))
    assert [p.grad is None for p in model.parameters()] == [True, True, False, False]
    with opt.perturbed():
        squares(model).backward()
        assert all(p.grad is not None for p in model.parameters())
    opt.step()


def test_plain_step_between_steps_computes_every_gradient():
    model = built()
    opt = cases.ssam(model, "b.*")
    opt.minimize(lambda: squares(model))
    before = cases.weights_of(model)
    for backward in (torch.Tensor.backward, opt.backward):
        opt.zero_grad()
        backward(squares(model))
        assert all(p.grad is not None for p in model.parameters())
    opt.base.step()
    assert not any(map(torch.equal, before, model.parameters()))


def test_no_activations_are_kept_after_step():
    model, seen = built(), []
    model.a.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    opt = cases.ssam(model, "b.*")
    for _ in range(2):
        opt.minimize(lambda: squares(model))
    gc.collect()
    assert opt.savings().reused > 0
    assert [output() for output in seen] == [None] * 4


# ---- it equals two plain passes; more in test_programs.py ----------------------------------------------------------


def test_reentrant_checkpoint_behind_a_perturbed_layer():
    """torch refuses to differentiate it in part."""
    model, twin = built(), built()
    for each, engine in ((model, True), (twin, False)):
        opt = cases.ssam(each, "a.*", engine=engine)
        opt.minimize(lambda each=each: checkpoint(each.b, each.a(X).relu(), use_reentrant=True).square().sum())
        assert opt.savings().gradients == 0
    assert cases.same_state(model, twin)


def test_mask_that_changes_between_phases_raises():
    model = built()
    opt = cases.ssam(model, sparsesam.random_mask(sparsity=0.5, pattern="filter"))
    opt.minimize(lambda: squares(model))
    before = cases.weights_of(model)
    opt.zero_grad()
    with opt.first_pass():
        opt.backward(squares(model))
    opt.refresh_mask()
    with pytest.raises(RuntimeError, match="before first_pass"), opt.perturbed():
        pass
    assert cases.same_bits(before, cases.weights_of(model))


def test_refresh_now_after_a_first_pass_needs_every_gradient():
    model = built()
    opt = cases.ssam(model, sparsesam.dynamic_mask(sparsity=0.5, pattern="filter", refresh=None))
    opt.minimize(lambda: squares(model))
    with opt.first_pass():
        opt.backward(squares(model))
    with pytest.raises(RuntimeError, match="needs every gradient"):
        opt.refresh_mask(now=True)


# ---- implicit ascent ---------------------------------------------------------------------------------------------


class Product(TwoParts):
    """A linear layer that is written out."""

    def forward(self, x):
        return self.b((x @ self.a.weight.t() + self.a.bias).relu())


def implicit(model, mask):
    return cases.ssam(model, mask, ascent="implicit")


def test_implicit_gradient_stops_at_unperturbed_last_layer():
    model = built()
    plain = copy.deepcopy(model)
    opt, base = implicit(model, "a.*"), cases.sgd(plain)
    cases.take_step(opt, lambda: squares(model))
    base.step(cases.closure_of(base, lambda: squares(plain)))
    cases.assert_close(model, plain, rtol=1e-12)
    assert opt.skipped_ascents == 1


def test_implicit_rejects_first_pass_without_its_weights():
    model = built()
    opt = implicit(model, half_of_rows(model))
    cases.take_step(opt, lambda: squares(model))  # the one that makes the mask
    before = cases.weights_of(model)
    with pytest.raises(RuntimeError, match="in torch's linear and convolution functions"):
        cases.take_step(opt, lambda: ((X @ model.a.weight.t()).relu() @ model.b.weight.t()).square().sum())
    assert cases.same_bits(before, cases.weights_of(model))


def test_implicit_rejects_first_pass_outside_of_its_block():
    model = built()
    opt = implicit(model, half_of_rows(model))
    cases.take_step(opt, lambda: squares(model))
    squares(model).backward()
    with pytest.raises(RuntimeError, match="did not see the first pass"), opt.perturbed():
        pass


def test_implicit_reports_where_it_was_explicit():
    model = built(Product)
    opt = implicit(model, half_of_rows(model))
    with pytest.warns(RuntimeWarning, match=r"explicit for a\.weight$"):
        cases.take_step(opt, lambda: squares(model))
