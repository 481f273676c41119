"""State that a module reads or writes besides its arguments and its result."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from tests import cases
from tests.ascent.test_user_code import compare, is_reused

LOOPS = [cases.with_closure, cases.in_two_phases]
HEAD = sparsesam.fixed_mask("head.*")


class Body(nn.Module):
    """A layer, followed by a function of the module and its output."""

    def __init__(self, act, held=None):
        super().__init__()
        self.layer, self.act, self.held = nn.Linear(6, 6), act, held

    def forward(self, x):
        return self.act(self, torch.tanh(self.layer(x)))


class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.head = body, nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(x))


def make(act, held=None):
    torch.manual_seed(0)
    return Net(Body(act, held)).double()


def counts_in_list(body, h):
    body.held[0] += 1
    return h * body.held[0]


def counts_in_object(body, h):
    body.held.count += 1
    return h * body.held.count


def writes_to_tensor_in_dictionary(body, h):
    body.held["mean"].mul_(0.5).add_(h.detach().mean())
    return h + body.held["mean"]


def draws(body, h):
    return h * body.held.random()


def takes_next(body, h):
    return h * next(body.held)


def calls(body, h):
    return h * body.held()


def counter():
    """A function that keeps a count."""
    count = [0]

    def called():
        count[0] += 1
        return count[0]

    return called


STATES = {
    "number in a list": (counts_in_list, lambda: [0]),
    "attribute of a namespace": (counts_in_object, lambda: SimpleNamespace(count=0)),
    "attribute of a custom object": (counts_in_object, lambda: type("State", (), {"count": 0})()),
    "tensor in a dictionary": (writes_to_tensor_in_dictionary, lambda: {"mean": torch.zeros(()).double()}),
    "Python generator": (draws, lambda: random.Random(0)),
    "numpy generator": (draws, lambda: np.random.default_rng(0)),
    "iterator": (takes_next, lambda: itertools.count(1)),
}


@pytest.mark.filterwarnings("ignore:Pickle, copy")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", STATES)
def test_state_in_module(name, loop):
    act, held = STATES[name]
    opt = compare(lambda: make(act, held()), HEAD, loop)
    assert not is_reused(opt, "body.layer.weight")


@pytest.mark.parametrize("loop", LOOPS)
def test_state_in_function(loop):
    ends = []
    for engine in (True, False):
        model = make(calls, counter())
        loop(cases.ssam(model, engine=engine), model, *cases.vectors(8))
        ends.append(cases.weights_of(model))
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("loop", LOOPS)
def test_hidden_teacher_that_follows_body(loop):
    def averaged(opt, model, x, y):
        with torch.no_grad():
            for slow, fast in zip(model.body.held[0].parameters(), model.body.layer.parameters(), strict=True):
                slow.lerp_(fast, 0.3)
        return F.cross_entropy(model(x), y)

    def by_closure(opt, model, x, y):
        cases.take_step(opt, lambda: averaged(opt, model, x, y))

    def taught(body, h):
        return h + torch.tanh(body.held[0](h.detach()))

    compare(lambda: make(taught, [nn.Linear(6, 6).double().requires_grad_(False)]), HEAD, by_closure)


def test_constant_settings_do_not_prevent_reuse():
    settings = {"config": SimpleNamespace(sizes=[1, 2], act=torch.tanh), "of": (nn.Linear, F.relu)}
    opt = compare(lambda: make(lambda body, h: h, settings), HEAD, cases.with_closure)
    assert is_reused(opt, "body.layer.weight")


class Renormalized(nn.BatchNorm1d):
    """Its output depends on its statistics in training mode too."""

    def forward(self, x):
        out = (x - self.running_mean) / (self.running_var + self.eps).sqrt()
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), 0.1)
            self.running_var.lerp_(x.var(0), 0.1)
        return out * self.weight + self.bias


@pytest.mark.parametrize("loop", LOOPS)
def test_custom_normalization(loop):
    compare(lambda: Net(nn.Sequential(nn.Linear(6, 6), Renormalized(6))).double(), HEAD, loop)


# ---- values with gradient ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("norm", ["masked", "full"])
@pytest.mark.parametrize("two_phases", [False, True])
def test_loss_appended_to_global_list(two_phases, norm, inner):
    losses = []

    def noted(body, h):
        losses.append(h.pow(2).mean())
        return h * 2 if inner else h

    def loss_of(model, x, y):
        losses.clear()
        return F.cross_entropy(model(x), y) + sum(losses)

    def loop(opt, model, x, y):
        cases.take_step(opt, lambda: loss_of(model, x, y), two_phases=two_phases)

    opt = compare(lambda: Net(Body(globals_of(noted))).double(), HEAD, loop, norm=norm)
    assert "other ways than by its input and output" in opt.engine_report()["engine"]


def globals_of(function):
    """Turn the function into a global one: the engine cannot see its closure variables."""
    return type("Global", (), {"__call__": staticmethod(function), "__deepcopy__": lambda self, _: self})()


@pytest.mark.parametrize("two_phases", [False, True])
def test_value_read_from_global(two_phases):
    place = {}

    class Conditioned(Net):
        def __init__(self):
            super().__init__(Body(globals_of(lambda body, h: h * place["condition"])))
            self.condition, self.calls = nn.Linear(6, 6), 0

        def forward(self, x):
            self.calls += 1
            place["condition"] = self.condition(x) * self.calls
            return super().forward(x)

    def loop(opt, model, x, y):
        cases.take_step(opt, lambda: F.cross_entropy(model(x), y), two_phases=two_phases)

    compare(lambda: Conditioned().double(), HEAD, loop)


class Scaled(torch.autograd.Function):
    """The same values, another gradient."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return ctx.factor * g, None


@pytest.mark.parametrize("norm", ["masked", "full"])
@pytest.mark.parametrize("loop", LOOPS)
def test_gradient_scale_that_changes_in_each_forward(loop, norm):
    class Reversing(Net):
        def __init__(self):
            super().__init__(nn.Linear(6, 6))
            self.middle, self.calls = nn.Linear(6, 6), 0

        def forward(self, x):
            self.calls += 1
            return self.head(self.middle(Scaled.apply(self.body(x), -0.1 * self.calls)))

    compare(lambda: Reversing().double(), HEAD, loop, norm=norm)


# ---- random numbers and memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("two_phases", [False, True])
def test_random_numbers_with_own_seed(two_phases):
    seeds = iter(range(100))

    def loop(opt, model, x, y):
        def loss_of():
            with torch.random.fork_rng():
                torch.manual_seed(next(seeds) % 6)
                return F.cross_entropy(model(x), y)

        cases.take_step(opt, loss_of, two_phases=two_phases)

    compare(lambda: Net(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))).double(), HEAD, loop)


@pytest.mark.parametrize("two_phases", [False, True])
def test_numpy_batch_that_is_overwritten(two_phases):
    array = np.zeros((8, 6))
    batch = torch.from_numpy(array)
    calls = itertools.count()

    def loop(opt, model, x, y):
        def loss_of():
            array[...] = x.numpy() * (1 + next(calls) % 2)
            return F.cross_entropy(model(batch), y)

        cases.take_step(opt, loss_of, two_phases=two_phases)

    compare(lambda: Net(nn.Linear(6, 6)).double(), HEAD, loop)
