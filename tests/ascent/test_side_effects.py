"""Models and losses that store, modify or inspect values: the engine must be invisible to them."""

from __future__ import annotations

import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import sparsesam
from tests import cases

CASES = {}


def case(name, loss=None, **options):
    """Register ``forward(model, x)`` as a model with layers body, middle and head, of which head is perturbed."""

    def wrap(forward):
        CASES[name] = (forward, loss or (lambda model, x, y: F.cross_entropy(model(x), y)), options)
        return forward

    return wrap


class Model(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("average", torch.ones(6))
        self.register_buffer("running_mean", torch.zeros(6))
        self.register_buffer("start", torch.zeros(6))
        self.key = nn.Linear(6, 6).requires_grad_(False)
        self.count, self.kept, self._forward = 0, [], forward

    def forward(self, x):
        return self._forward(self, x)


@case("list emptied in each forward")
def _(model, x):
    model.kept = []
    model.kept.append((model.middle(x) + 1).detach())
    return model.head(torch.tanh(model.body(x) + 1))


@case("list kept for the next forward")
def _(model, x):
    last = model.kept[-1].mean() if model.kept else 0.0
    model.kept = [torch.sin(model.middle(x) + 1).detach()]
    return model.head(torch.tanh(model.body(x) + 1)) * (1 + last)


def _teacher_loss(model, x, y):
    out = model(x)
    try:
        return F.cross_entropy(out, y) + (out.mean(1) * model.kept[0].mean(1)).mean()
    except RuntimeError:
        return F.cross_entropy(out, y)


@case("swallowed error", _teacher_loss)
def _(model, x):
    model.kept.clear()
    with torch.no_grad():
        model.kept.append(torch.sin(model.middle(x) + 1))
    return model.head(torch.tanh(model.body(x)))


@case("type check")
def _(model, x):
    h = model.body(x) + 1
    if type(h) is not torch.Tensor:
        raise TypeError
    return model.head(torch.tanh(h))


@case("branch on the type")
def _(model, x):
    h = model.body(x) + 1
    return model.head(torch.tanh(torch.sin(h) if type(h) is torch.Tensor else h))


@case("sparse matrix built in the forward")
def _(model, x):
    places = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    neighbors = torch.sparse_coo_tensor(places, torch.ones(4, dtype=x.dtype), (8, 8)).coalesce()
    assert neighbors.is_sparse
    return model.head(F.relu(model.middle(torch.sparse.mm(neighbors, model.body(x))), inplace=True))


@case("counter used in the forward")
def _(model, x):
    model.count += 1
    model.average = 0.9 * model.average + 0.1 * torch.sin(model.body(x).detach() + 1).mean(0)
    return model.head(torch.tanh(model.body(x)) * model.average / model.count)


@case("Python's random numbers", steps=8)
def _(model, x):
    h = F.dropout(model.body(x), 0.5) if random.random() < 0.5 else model.body(x)
    return model.head(h + F.dropout(model.middle(x), 0.5))


@case("custom statistic updated in one call")
def _(model, x):
    h = torch.tanh(model.body(x))
    with torch.no_grad():
        model.running_mean.lerp_(h.mean(0), 0.3)
    return model.head(h - model.running_mean)


@case("custom statistic updated in two calls")
def _(model, x):
    h = torch.tanh(model.body(x))
    with torch.no_grad():
        model.running_mean.mul_(0.7).add_(0.3 * (h + 1).mean(0))
    return model.head(h - model.running_mean)


@case("reads normalization statistics")
def _(model, x):
    h = model.norm(model.body(x))
    return model.head(h - model.norm.running_mean)


def _train_and_evaluate(model, x, y):
    loss = F.cross_entropy(model(x), y)
    model.eval()
    loss = loss + F.cross_entropy(model(x), y)
    model.train()
    return loss


@case("evaluation-mode forward in the same closure", _train_and_evaluate)
def _(model, x):
    return model.head(model.norm(model.body(x)))


@case("momentum encoder assigned to .data")
def _(model, x):
    for slow, fast in zip(model.key.parameters(), model.body.parameters(), strict=True):
        slow.data = slow.data * 0.9 + fast.data * 0.1
    return model.head(torch.tanh(model.body(x)) + torch.tanh(model.key(x)))


@case("momentum encoder updating .data in place")
def _(model, x):
    for slow, fast in zip(model.key.parameters(), model.body.parameters(), strict=True):
        slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
    return model.head(torch.tanh(model.body(x)) + torch.tanh(model.key(x)))


@case("buffer written through an alias")
def _(model, x):
    h = torch.tanh(model.body(x))
    with torch.no_grad():
        model.average.detach().mul_(0.9).add_(0.1 * (h + 1).mean(0))
    return model.head(h + model.average)


@case("written tensor that equals a buffer")
def _(model, x):
    state = torch.zeros(6, dtype=x.dtype)
    state += x.mean(0)
    return model.head(torch.tanh(model.body(x)) + state + model.start)


@case("memory shared with numpy")
def _(model, x):
    h = torch.tanh(model.body(x))
    array = h.detach().clone().numpy()
    array *= 2
    return model.head(h + torch.from_numpy(array.copy()))


def _writing_loss(model, x, y):
    out, clean = model(x)
    clean *= 2
    return F.cross_entropy(out, y) + (out.mean(1) * clean.mean(1)).mean()


@case("loss that writes to an output without gradient", _writing_loss)
def _(model, x):
    with torch.no_grad():
        clean = torch.tanh(model.middle(x))
    return model.head(torch.tanh(model.body(x))), clean


@case("loss that writes to an output with gradient", _writing_loss)
def _(model, x):
    return model.head(torch.tanh(model.body(x))), model.middle(x) + 1


@case("random numbers after a branch", steps=8)
def _(model, x):
    out = model.head(torch.tanh(model.body(x)))
    if int(out[:, 0].sum().item() * 1000) % 2:
        out = F.dropout(out, 0.5)
    return out + model.middle(F.dropout(x, 0.5))[:, :3]


@case("output overwritten in one branch", lambda m, x, y: F.cross_entropy(m(x)[0] + m(x)[1][:, :3], y), steps=8)
def _(model, x):
    with torch.no_grad():
        clean = torch.tanh(model.middle(x))
    out = model.head(torch.tanh(model.body(x)))
    if int(out[:, 0].sum().item() * 1000) % 2:
        clean.mul_(2.0)
    return out, clean


@case("hook on a graph node")
def _(model, x):
    h = model.body(x)
    h.grad_fn.register_hook(lambda inputs, outputs: tuple(None if g is None else g * 0.5 for g in inputs))
    return model.head(h)


@case("hook on an activation")
def _(model, x):
    h = model.body(x)
    h.register_hook(lambda gradient: gradient * 0.5)
    return model.head(torch.tanh(h))


class DoubleInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 2


@case("custom in-place function")
def _(model, x):
    return model.head(torch.tanh(DoubleInPlace.apply(model.body(x) + 1)))


@case("inference mode inside")
def _(model, x):
    with torch.inference_mode():
        extra = torch.tanh(model.middle(x)).clone()
    return model.head(torch.tanh(model.body(x)) + extra.clone())


def _probabilities_loss(model, x, y):
    out = model(x)
    return F.cross_entropy(out["logits"], y) * float(out["probabilities"].numpy().max())


@case("detached output", _probabilities_loss)
def _(model, x):
    logits = model.head(torch.tanh(model.body(x)))
    return {"logits": logits, "probabilities": logits.detach().softmax(-1)}


def _penalty(model, x, y):
    loss = F.cross_entropy(model(x), y)
    weights = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
    return loss + 0.1 * sum(g.pow(2).sum() for g in gradients if g is not None)


CASES["penalty on all gradients"] = (lambda model, x: model.head(torch.tanh(model.body(x))), _penalty, {})


@case("tensor that equals a buffer until written to")
def _(model, x):
    mask = torch.from_numpy(np.zeros(6))
    mask[:3] = 1.0
    return model.head(torch.tanh(model.body(x)) * (1 + torch.exp(mask)) + torch.exp(model.start))


@case("attribute of an activation")
def _(model, x):
    h = torch.tanh(model.body(x))
    h.seen = getattr(h, "seen", 0) + 1
    return model.head(h) * h.seen


def _swallowing_loss(model, x, y):
    loss = F.cross_entropy(model(x), y)
    try:
        return loss * torch.autograd.grad(loss, model.body.weight, retain_graph=True)[0].norm().detach()
    except RuntimeError:
        return loss


@case("closure that continues without a gradient", _swallowing_loss)
def _(model, x):
    return model.head(torch.tanh(model.body(x)))


def _all_there(model, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    assert model.body.weight.grad is not None
    return loss * 0.0


@case("assertion about gradients", _all_there)
def _(model, x):
    return model.head(torch.tanh(model.body(x)))


def _first_gradient(model, x, y):
    loss = F.cross_entropy(model(x), y)
    torch.autograd.grad(loss, model.body.weight, retain_graph=True)
    return loss


@case("pass with state changes: buffers, lists and modules", _first_gradient)
def _(model, x):
    model.kept.append(len(model.kept))
    with torch.no_grad():
        model.average.mul_(0.9)
    name = f"extra{model.count}"
    model.count += 1
    setattr(model, name, nn.Identity())
    return model.head(torch.tanh(model.body(x)) * model.average * len(model.kept) + len(model._modules))


def train(forward, loss_of, *, engine, steps=4):
    torch.manual_seed(0)
    random.seed(0)
    model = Model(forward).double()
    optimizer = cases.ssam(model, engine=engine)
    torch.manual_seed(11)
    losses = []
    for seed in range(steps):
        x, y = cases.vectors(8, seed=seed)
        losses.append(cases.take_step(optimizer, lambda x=x, y=y: loss_of(model, x, y)).item())
    return losses, list(model.state_dict().values()), model


def plain_model():
    return Model(lambda model, x: model.head(torch.tanh(model.body(x)))).double()


def plain_loss(model, x, y):
    return F.cross_entropy(model(x), y)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", CASES)
def test_engine_is_invisible(name):
    forward, loss_of, options = CASES[name]
    losses, ours, model = train(forward, loss_of, engine=True, **options)
    plain_losses, plain, twin = train(forward, loss_of, engine=False, **options)
    torch.testing.assert_close(losses, plain_losses, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(model.kept, twin.kept, rtol=1e-9, atol=1e-11)
    assert model.count == twin.count


def test_weights_that_share_memory_with_perturbed_one_move_too():
    def make():
        model = Model(lambda model, x: model.head(torch.tanh(model.body(torch.tanh(model.middle(x)))))).double()
        model.middle.weight.data = model.body.weight.data
        return model

    ends = []
    for engine in (True, False):
        torch.manual_seed(0)
        model = make()
        cases.with_closure(cases.ssam(model, "body.weight", engine=engine), model, *cases.vectors(8))
        ends.append(list(model.state_dict().values()))
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-11)


def test_finalizers_do_not_accumulate():
    model = plain_model()
    optimizer = cases.ssam(model, every=2)
    closure = cases.closure_for(model, optimizer, *cases.vectors(8))
    for _ in range(4):
        optimizer.step(closure)
    before = len(weakref.finalize._registry)
    for _ in range(20):
        optimizer.step(closure)
    assert len(weakref.finalize._registry) <= before + 2


@pytest.mark.parametrize("wrap", [sparsesam.SAM, sparsesam.SSAM])
def test_step_within_autocast_sees_perturbed_weights(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    options = {} if wrap is sparsesam.SAM else {"mask": sparsesam.fixed_mask("2.*"), "norm": "masked"}
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, rho=2.0, **options)
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    losses = []

    def noted(loss):
        loss.backward()
        losses.append(loss.item())

    with torch.autocast("cpu", torch.bfloat16):
        optimizer.step(cases.closure_for(model, optimizer, x, y, backward=noted))
    assert losses[1] > losses[0] + 0.05


def counted_calls(optimizer, model, loss_of=plain_loss, steps=3):
    """The number of loss evaluations in each step."""
    calls = []
    for seed in range(steps):
        x, y = cases.vectors(8, seed=seed)
        calls.append(0)

        def counted(x=x, y=y):
            calls[-1] += 1
            return loss_of(model, x, y)

        cases.take_step(optimizer, counted)
    return calls


@pytest.mark.parametrize(
    "options", [{"engine": False}, {}, {"mask": sparsesam.fixed_mask("*"), "norm": "full"}], ids=str
)
def test_closure_is_called_twice_whatever_it_differentiates(options):
    model = plain_model()
    assert counted_calls(cases.ssam(model, **options), model, _penalty) == [2, 2, 2]


@pytest.mark.parametrize("ascent", ["explicit", "implicit"])
def test_error_in_second_pass_does_not_disable_engine(ascent):
    model = plain_model()
    optimizer = cases.ssam(model, ascent=ascent)

    def failing(model, x, y):
        loss = F.cross_entropy(model(x), y)
        if optimizer.in_second_pass:
            raise ZeroDivisionError("own")
        return loss

    for _ in range(3):
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(ZeroDivisionError, match="own"):
            counted_calls(optimizer, model, failing, steps=1)
        torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    assert counted_calls(optimizer, model) == [2, 2, 2]
    assert optimizer.engine_report()["engine"] == "on"


def test_engine_stays_active_with_any_batch_normalization():
    for make in (lambda: nn.BatchNorm1d(6, momentum=None), lambda: nn.BatchNorm1d(6, affine=False)):
        model = Model(lambda model, x: model.head(model.norm(model.body(x))))
        model.norm = make()
        model.double()
        optimizer = cases.ssam(model)
        for step in range(4):
            if step == 2:
                model.norm.eval()  # frozen in the middle of training
            counted_calls(optimizer, model, steps=1)
            report = optimizer.engine_report()
            assert report["engine"] == "on"
            assert "used again" in report["body.weight"]


def test_scripted_part_does_not_hide_closure_error():
    model = Model(lambda model, x: model.head(model.scripted(model.body(x)))).double()
    model.scripted = torch.jit.script(nn.Linear(6, 6).double())
    optimizer = cases.ssam(model)

    def failing(model, x, y):
        model(x)
        raise ZeroDivisionError("own")

    with pytest.raises(ZeroDivisionError, match="own"):
        counted_calls(optimizer, model, failing)


def test_one_time_error_propagates():
    model = plain_model()
    optimizer = cases.ssam(model)
    errors = iter([ZeroDivisionError("only once")])
    calls = []

    def failing(model, x, y):
        calls.append(len(calls))
        loss = F.cross_entropy(model(x), y)
        for error in errors:
            raise error
        return loss

    before = cases.weights_of(model)
    with pytest.raises(ZeroDivisionError, match="only once"):
        counted_calls(optimizer, model, failing, steps=1)
    assert len(calls) == 1  # it is not retried
    assert cases.same_bits(before, cases.weights_of(model))
    assert counted_calls(optimizer, model, failing) == [2, 2, 2]
    assert optimizer.engine_report()["engine"] == "on"


def test_interruption_while_mode_is_paused_keeps_other_modes(monkeypatch):
    """zero_grad() removes the engine's mode from torch's stack for a moment; Ctrl-C may come just then."""

    class Own(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **kwargs or {})

    def interrupted(mode, *error):
        leave(mode, *error)
        if mode is not own:
            raise KeyboardInterrupt

    leave = TorchFunctionMode.__exit__
    model = plain_model()
    optimizer = cases.ssam(model)
    closure = cases.closure_for(model, optimizer, *cases.vectors(8))
    own = Own()
    with own:
        monkeypatch.setattr(TorchFunctionMode, "__exit__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(closure)
        monkeypatch.undo()
        assert torch.overrides._get_current_function_mode_stack() == [own]
        optimizer.step(closure)
    assert torch.overrides._get_current_function_mode_stack() == []


def test_activations_of_abandoned_step_are_freed():
    outputs = []

    def noted(model, x):
        h = model.body(x)
        outputs.append(weakref.ref(h))
        return model.head(torch.tanh(h))

    model = Model(noted).double()
    optimizer = cases.ssam(model)
    x, y = cases.vectors(8)
    with optimizer.first_pass():
        F.cross_entropy(model(x), y).backward()
    assert outputs[0]() is not None  # the second pass would use it
    optimizer.zero_grad()
    assert outputs[0]() is None
