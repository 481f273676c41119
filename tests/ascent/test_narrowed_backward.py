"""A closure's backward is deferred until the closure returns, without an effect that the closure could observe."""

from __future__ import annotations

import functools
import inspect
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from sparsesam.ascent import prefix
from tests import cases
from tests.ascent.test_user_code import compare, is_reused, make, single_precision, some_filters

LOOPS = {}
#: torch 2.6 hides this function from modes, so nothing is skipped there.
FUNCTION_IS_VISIBLE = "handle_torch_function" in inspect.getsource(torch.autograd.backward)


def loop(*, narrowed=False, reused=True):
    """Register what a closure does with its forward and backward, and what the engine may skip in it."""

    def wrap(body):
        LOOPS[body.__name__] = (body, narrowed, reused)
        return body

    return wrap


def run(body, opt, model, x, y):
    def closure():
        opt.zero_grad()
        return body(opt, model, x, y)

    opt.step(closure)


def loss_of(model, x, y):
    return F.cross_entropy(model(x), y)


# ---- only reads values: the backward stays narrowed -------------------------------------------------------------


@loop(narrowed=True)
def returns_loss(opt, model, x, y):
    loss = loss_of(model, x, y)
    loss.backward()
    return loss


@loop(narrowed=True)
def logs_loss_and_accuracy(opt, model, x, y):
    out = model(x)
    loss = F.cross_entropy(out, y)
    loss.backward()
    model.log = f"{loss:.3f} {loss.item()} {float(loss.detach() / 2)} {loss} {out.shape}"
    assert torch.isfinite(loss)
    assert loss == loss
    with torch.no_grad():
        model.correct = (out.argmax(1) == y).float().mean().item() * len(x)
    return loss.item()


@loop(narrowed=FUNCTION_IS_VISIBLE, reused=FUNCTION_IS_VISIBLE)
def calls_autograd_backward(opt, model, x, y):
    loss = loss_of(model, x, y)
    torch.autograd.backward([loss])
    return loss.detach()


@loop(narrowed=FUNCTION_IS_VISIBLE, reused=FUNCTION_IS_VISIBLE)
def two_losses_in_one_backward(opt, model, x, y):
    out = model(x)
    losses = [F.cross_entropy(out, y), out.square().mean()]
    torch.autograd.backward(losses)
    return losses[0]


@loop(narrowed=True)
def leaf_outside_of_model(opt, model, x, y):
    """It receives the gradients of both passes, as without the engine."""
    if not hasattr(model, "kept"):
        model.kept = [torch.ones(3, dtype=torch.float64, requires_grad=True)]
    loss = F.cross_entropy(model(x) * model.kept[0], y)
    loss.backward()
    return loss


# ---- reads gradients: all of them are there ----------------------------------------------------------------------


@loop()
def clips_norm(opt, model, x, y):
    loss = loss_of(model, x, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    return loss


@loop()
def clips_by_value(opt, model, x, y):
    loss = loss_of(model, x, y)
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return loss


@loop(reused=False)  # the weight is read before the forward
def writes_to_weight_with_out(opt, model, x, y):
    values = model.head.weight.detach().square()
    loss = loss_of(model, x, y)
    loss.backward()
    with torch.no_grad():
        torch.sqrt(values, out=model.head.weight)
    return loss


@loop()
def reads_unperturbed_gradient_every_third_step(opt, model, x, y):
    loss = loss_of(model, x, y)
    loss.backward()
    if opt.steps % 3 == 2:
        model.head.bias.grad.mul_(1 + model.body.weight.grad.norm())
    return loss


@loop(reused=False)
def steps_another_optimizer(opt, model, x, y):
    loss = loss_of(model, x, y)
    loss.backward()
    torch.optim.SGD([model.body.bias], lr=0.1).step()
    return loss


@loop()
def writes_gradient(opt, model, x, y):
    loss = loss_of(model, x, y)
    loss.backward()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    return loss


@loop(reused=False)
def accumulates_over_micro_batches(opt, model, x, y):
    total = 0.0
    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
        loss = loss_of(model, a, b) / 4
        loss.backward()
        total += loss.item()
    return total


@loop(reused=False)
def differentiates_again(opt, model, x, y):
    loss = loss_of(model, x, y)
    loss.backward(retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, model.body.weight)
    model.head.bias.grad.add_(gradient.mean())
    return loss


@loop(reused=False)
def calls_autograd_grad(opt, model, x, y):
    loss = loss_of(model, x, y)
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    return loss


@loop(reused=False)
def penalty_after_backward(opt, model, x, y):
    loss = loss_of(model, x, y)
    loss.backward()
    (gradient,) = torch.autograd.grad(model.head.weight.square().sum(), model.head.weight)
    model.head.weight.grad.add_(gradient)
    return loss


# ---- writes to values, after the backward ------------------------------------------------------------------------


@loop()
def writes_to_output(opt, model, x, y):
    out = model(x)
    loss = F.cross_entropy(out.tanh(), y)
    loss.backward()
    out.detach().mul_(3)
    return loss


@loop()
def writes_to_weight(opt, model, x, y):
    loss = loss_of(model, x, y)
    loss.backward()
    with torch.no_grad():
        model.head.weight.mul_(0.99)
    return loss


@loop()
def writes_through_data(opt, model, x, y):
    h = model.body(x).tanh()
    loss = F.cross_entropy(model.head(h), y)
    loss.backward()
    h.data.mul_(5)
    return loss


@loop()
def writes_through_numpy(opt, model, x, y):
    loss = loss_of(model, x, y).exp()
    loss.backward()
    array = loss.detach().numpy()
    array *= 0.1
    return loss


@loop()
def freezes_layer(opt, model, x, y):
    loss = loss_of(model, x, y)
    loss.backward()
    model.middle.requires_grad_(False)
    model.middle.requires_grad_(True)
    return loss


@loop()
def clears_part_of_gradient(opt, model, x, y):
    loss = loss_of(model, x, y)
    loss.backward()
    model.head.bias.grad = None
    return loss


# ---- observes when the backward runs ----------------------------------------------------------------------------


@loop(reused=False)
def hook_on_activation(opt, model, x, y):
    seen = []
    h = model.body(x).tanh()
    h.register_hook(lambda g: seen.append(g.norm()))
    loss = F.cross_entropy(model.head(model.middle(h)), y)
    loss.backward()
    return loss * seen[0]


@loop()
def hook_on_perturbed_weight(opt, model, x, y):
    seen = []
    handle = model.head.weight.register_hook(lambda g: seen.append(float(g.norm())))
    loss = loss_of(model, x, y)
    loss.backward()
    handle.remove()
    model.seen = [*getattr(model, "seen", []), *seen]
    assert len(seen) == 1
    return loss


@loop()
def hook_on_unperturbed_weight(opt, model, x, y):
    seen = []
    handle = model.body.weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))
    loss = loss_of(model, x, y)
    loss.backward()
    handle.remove()
    assert len(seen) == 1
    return loss


@loop(reused=False)
def hook_on_graph_node(opt, model, x, y):
    seen = []
    loss = loss_of(model, x, y)
    loss.grad_fn.register_hook(lambda *_: seen.append(1))
    loss.backward()
    assert seen == [1]
    return loss


@loop(reused=False)
def retains_grad(opt, model, x, y):
    out = model(x)
    out.retain_grad()
    loss = F.cross_entropy(out, y)
    loss.backward()
    model.head.bias.grad.add_(out.grad.norm())
    return loss


class Reversed(torch.autograd.Function):
    strength = 1.0

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        Reversed.calls = getattr(Reversed, "calls", 0) + 1
        return -Reversed.strength * g


@loop()
def stateful_autograd_function(opt, model, x, y):
    Reversed.strength = 0.5
    loss = F.cross_entropy(Reversed.apply(model(x)), y)
    before = getattr(Reversed, "calls", 0)
    loss.backward()
    assert Reversed.calls == before + 1
    Reversed.strength = 7.0
    return loss


@loop()
def anomaly_detection(opt, model, x, y):
    with torch.autograd.set_detect_anomaly(True):
        loss = loss_of(model, x, y)
        loss.backward()
    return loss


@loop(reused=False)
def catches_backward_error(opt, model, x, y):
    loss = loss_of(model, x, y)
    try:
        x.sum().backward()
    except RuntimeError:
        loss.backward()
    return loss


MASKS = {"head": lambda: sparsesam.fixed_mask("head.*"), "filters": lambda: some_filters(make(), "middle", "head")}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("norm", ["masked", "full"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", LOOPS)
def test_closure_code_around_backward(name, mask, norm):
    body, narrowed, reused = LOOPS[name]
    opt = compare(make, MASKS[mask](), lambda *given: run(body, *given), norm=norm)
    report = opt.engine_report()
    if norm == "masked" and mask == "head":
        assert report["body.weight"].startswith("not perturbed: no weight gradient") == narrowed
        assert is_reused(opt) == reused


@pytest.mark.parametrize("place", ["input", "output"])
def test_gradients_of_other_leaves_accumulate_over_passes(place):
    found = []
    for engine in (True, False):
        model, scale = make(), torch.ones(1, dtype=torch.float64, requires_grad=True)
        opt = cases.ssam(model, engine=engine)
        x, y = cases.vectors(8)

        def scaled(x, model=model, scale=scale):
            return model(x * scale) if place == "input" else model(x) * scale

        opt.step(cases.closure_for(scaled, opt, x, y))
        found.append(scale.grad)
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


def test_backward_within_autocast_stays_in_autocast():
    def body(opt, model, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, x, y)
            loss.backward()
        return loss

    compare(lambda: make().float(), MASKS["head"](), lambda *given: run(body, *given), data=single_precision)


def test_backward_error_propagates():
    model = make()
    opt = cases.ssam(model)

    def body(opt, model, x, y):
        h = model.body(x).tanh()
        loss = model.head(h).exp().sum()
        with torch.no_grad():
            h.add_(1)
        loss.backward()
        return loss

    before = cases.weights_of(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(body, opt, model, *cases.vectors(8))
    assert cases.same_bits(before, cases.weights_of(model))
    run(returns_loss, opt, model, *cases.vectors(8))
    assert opt.engine_report()["engine"] == "on"


def test_closure_raising_after_backward_leaves_no_state():
    model = make()
    opt = cases.ssam(model)

    def body(opt, model, x, y):
        loss_of(model, x, y).backward()
        raise ZeroDivisionError("own")

    with pytest.raises(ZeroDivisionError, match="own"):
        run(body, opt, model, *cases.vectors(8))
    assert not torch.overrides._get_current_function_mode_stack()
    run(returns_loss, opt, model, *cases.vectors(8))
    assert opt.engine_report()["engine"] == "on"


def test_graph_of_first_pass_is_freed_before_second():
    model, alive = make(), []
    opt = cases.ssam(model, some_filters(model, "middle", "head"))

    def body(opt, model, x, y):
        alive.append([one() is not None for one in kept])
        h = model.body(x).tanh()
        out = model.middle(h).tanh()
        kept.extend((weakref.ref(h), weakref.ref(out)))
        loss = F.cross_entropy(model.head(out), y)
        loss.backward()
        return loss

    kept = []
    run(body, opt, model, *cases.vectors(8))
    assert alive == [[], [False, False]]


def some_vectors(count, _, seed):
    return cases.vectors(count, seed=seed)


def test_small_torch_modules_are_rerun(monkeypatch):
    """Checking whether they can be skipped would take longer."""
    monkeypatch.setattr(prefix, "SMALLEST_WORK", 8 * 6 * 43)
    for count, reused in ((8, True), (7, False)):
        data = functools.partial(some_vectors, count)
        opt = compare(make, MASKS["head"](), lambda *given: run(returns_loss, *given), data=data)
        assert opt.engine_report()["engine"] == "on"
        assert is_reused(opt) == reused
