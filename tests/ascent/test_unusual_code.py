"""Models and closures that do something unusual train the same with the engine and without it."""

from __future__ import annotations

import copy
import random
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sparsesam
from sparsesam.ascent import layers
from tests import cases

HEAD = sparsesam.fixed_mask("head.*")


def loss_of(model, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


def train(make_model, mask, body, *, engine):
    """Three steps on a new model; ``body`` is the closure without zero_grad()."""
    torch.manual_seed(0)
    model = make_model().double()
    rule = mask(model) if isinstance(mask, types.FunctionType) else mask
    opt = sparsesam.SSAM(cases.sgd(model), model, rho=0.3, mask=rule, norm="masked", engine=engine)
    for seed in range(3):
        x, y = cases.vectors(8, seed=seed)

        def closure(x=x, y=y):
            opt.zero_grad()
            return body(model, x, y)

        opt.step(closure)
    return opt, [*model.state_dict().values(), torch.tensor(opt.skipped_steps), torch.tensor(opt.skipped_ascents)]


def compare(make_model, mask=HEAD, body=loss_of):
    opt, found = train(make_model, mask, body, engine=True)
    _, wanted = train(make_model, mask, body, engine=False)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    assert opt.engine_report()["engine"].startswith("on")
    return opt


class Net(nn.Module):
    def __init__(self, body=None):
        super().__init__()
        self.body = nn.Linear(6, 6) if body is None else body
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


class Holder(nn.Module):
    """A layer with an attribute, and a function of both and of the layer's output."""

    def __init__(self, held, act=lambda module, h: h):
        super().__init__()
        self.layer, self.held, self.act = nn.Linear(6, 6), held, act

    def forward(self, x):
        return self.act(self, self.layer(x))


# ---- what a module holds ---------------------------------------------------------------------------------------


class OneSlot:
    __slots__ = ("value",)


@pytest.mark.parametrize("make_held", [lambda: {"a": 1}.keys(), OneSlot, object, lambda: ...])
def test_attributes_without_a_dictionary(make_held):
    compare(lambda: Net(Holder(make_held())))


@pytest.mark.parametrize(
    "make_held",
    [lambda: random.Random(0).random, lambda: [float(number) for number in range(40)].pop],
    ids=["method of a generator", "method of a list"],
)
def test_bound_methods_of_builtin_types(make_held):
    compare(lambda: Net(Holder(make_held(), lambda module, h: h * (1 + module.held()))))


def test_function_with_a_mutable_default():
    def make_model():
        def act(module, h, count=[0]):  # noqa: B006
            count[0] += 1
            return h * count[0]

        return Net(Holder(None, act))

    compare(make_model)


# ---- forward as an attribute of the instance -------------------------------------------------------------------


def test_instance_forward_that_counts_its_calls():
    def make_model():
        model = Net()
        plain, count = model.body.forward, [0]

        def forward(x):
            count[0] += 1
            return plain(x) * count[0]

        model.body.forward = forward
        return model

    compare(make_model)


def tripled(module, x):
    return nn.Linear.forward(module, x) * 3


def test_copy_made_in_the_closure_keeps_an_instance_forward():
    def make_model():
        model = Net()
        model.body.forward = types.MethodType(tripled, model.body)
        return model

    def body(model, x, y):
        loss = F.cross_entropy(model(x) + copy.deepcopy(model)(x).detach(), y)
        loss.backward()
        return loss

    compare(make_model, body=body)


def test_forward_assigned_in_the_closure_stays():
    def body(model, x, y):
        if "forward" not in model.body.__dict__ or not hasattr(model, "is_assigned"):
            model.is_assigned = True
            model.body.forward = types.MethodType(tripled, model.body)
        return loss_of(model, x, y)

    compare(Net, body=body)


# ---- normalization statistics ----------------------------------------------------------------------------------


class ReadsOwnStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(self.layer(x)) - self.norm.running_mean


class ReadsOtherStatistics(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.held = [norm]

    def forward(self, h):
        return h - self.held[0].running_mean


class TwoParts(Net):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
        self.shift = ReadsOtherStatistics(self.body[1])

    def forward(self, x):
        return self.head(self.shift(self.body(x)))


@pytest.mark.parametrize("make_model", [lambda: Net(ReadsOwnStatistics()), TwoParts])
def test_unperturbed_module_reads_running_statistics(make_model):
    compare(make_model)


# ---- what a closure does ---------------------------------------------------------------------------------------


def test_forward_hook_registered_in_the_closure():
    def body(model, x, y):
        seen = []
        hook = model.body[0].register_forward_hook(lambda module, args, output: seen.append(output.detach().norm()))
        loss = F.cross_entropy(model(x), y) * (1 + sum(seen))
        hook.remove()
        loss.backward()
        return loss

    compare(lambda: Net(nn.Sequential(nn.Linear(6, 6), nn.Tanh())), body=body)


def test_batch_written_through_data_after_the_backward():
    def body(model, x, y):
        loss = loss_of(model, x, y)
        x.data.mul_(1.5)
        return loss

    compare(Net, body=body)


@pytest.mark.parametrize("is_restored", [True, False])
def test_perturbed_parameter_is_frozen_in_the_closure(is_restored):
    def body(model, x, y):
        model.head.bias.requires_grad_(False)
        loss = loss_of(model, x, y)
        model.head.bias.requires_grad_(is_restored)
        return loss

    compare(Net, body=body)


def test_every_perturbed_parameter_is_frozen_in_the_closure():
    def body(model, x, y):
        model.head.requires_grad_(False)
        loss = loss_of(model, x, y)
        model.head.requires_grad_(True)
        return loss

    compare(Net, body=body)


class SkipsItsHead(Net):
    def forward(self, x):
        return torch.tanh(self.body(x))[:, :3]


def test_closure_without_a_result_and_an_unused_perturbed_layer():
    compare(SkipsItsHead, body=lambda model, x, y: loss_of(model, x, y) and None)


class Doubles(nn.Module):
    def forward(self, x):
        return x * 2 if self.training else x


class Checkpointed(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), last), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(checkpoint(self.middle, torch.tanh(self.body(x)), use_reentrant=False)))


@pytest.mark.parametrize("make_last", [lambda: nn.BatchNorm1d(6), Doubles])
def test_evaluation_mode_after_the_backward_of_a_checkpoint(make_last):
    def body(model, x, y):
        model.train()
        loss = loss_of(model, x, y)
        model.eval()
        return loss

    opt = compare(lambda: Checkpointed(make_last()), sparsesam.fixed_mask("middle.*", "head.*"), body)
    assert not opt.base.param_groups[0]["params"][0].grad.isnan().any()


# ---- layers ----------------------------------------------------------------------------------------------------


class WeightStandardized(nn.Conv1d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean((1, 2), keepdim=True), bias)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = WeightStandardized(1, 4, 3), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.conv(x[:, None])).flatten(1))


def every_second_filter(model):
    masks = {name: torch.zeros_like(one, dtype=torch.bool) for name, one in model.named_parameters()}
    for mask in masks.values():
        mask[::2] = True
    return sparsesam.fixed_mask(masks)


def test_convolution_that_changes_its_weights_first():
    compare(ConvNet, every_second_filter)


# ---- compiled functions ----------------------------------------------------------------------------------------


def test_model_called_inside_a_compiled_function():
    """Its modules are not called any more, so that nothing can be left out; the report says what to do instead."""
    model = Net().double()
    compiled = torch.compile(lambda x, y: F.cross_entropy(model(x), y), backend="aot_eager")
    plain = copy.deepcopy(model)
    opt = sparsesam.SSAM(cases.sgd(model), model, rho=0.3, mask=HEAD, norm="masked")
    other = sparsesam.SSAM(cases.sgd(plain), plain, rho=0.3, mask=HEAD, norm="masked", engine=False)
    for seed in range(3):
        x, y = cases.vectors(8, seed=seed)
        opt.step(cases.closure_of(opt, lambda x=x, y=y: compiled(x, y)))
        other.step(cases.closure_for(plain, other, x, y))
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(plain), rtol=1e-9, atol=1e-11)
    assert "compile_blocks" in opt.engine_report()["engine"]


# ---- one module, several calls ---------------------------------------------------------------------------------


class CalledTwice(nn.Module):
    """Both calls get equal values from different weights; the output of the first is then changed, or exposed."""

    def __init__(self, change):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second, self.body, self.head = copy.deepcopy(self.first), nn.Linear(6, 6), nn.Linear(6, 3)
        self.change = change

    def forward(self, x):
        u = self.body(self.first(x))
        self.change(u)
        return self.head(u * 2 + self.body(self.second(x)).sin())


@pytest.mark.parametrize(
    "change",
    [lambda u: None, lambda u: u.mul_(0.5), lambda u: u.detach().numpy(), lambda u: u.data.mul_(0.5)],
    ids=["not", "in place", "numpy", "data"],
)
def test_each_call_of_a_module_is_compared_with_its_own_record(change):
    compare(lambda: CalledTwice(change))


# ---- more about normalization statistics -----------------------------------------------------------------------


class Normalized(nn.Module):
    """Adds to the output of batch normalization what ``read`` returns, called before the layer or after it."""

    def __init__(self, read, *, before=False):
        super().__init__()
        self.layer, self.norm, self.read, self.before = nn.Linear(6, 6), nn.BatchNorm1d(6), read, before

    def forward(self, x):
        early = self.read(self.norm, x) if self.before else None
        h = self.norm(self.layer(x))
        return h + (early if self.before else self.read(self.norm, h))


class ReadsBetween(Net):
    """The same outside of the module, whose output is reused."""

    def __init__(self, read, *, before=False):
        super().__init__(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
        self.read, self.before = read, before

    def forward(self, x):
        early = self.read(self.body[1], x) if self.before else None
        h = self.body(x)
        return self.head(torch.tanh(h + (early if self.before else self.read(self.body[1], h))))


READS = {
    "number of batches": lambda norm, h: norm.num_batches_tracked * 0.1,
    "in evaluation mode": lambda norm, h: F.batch_norm(h, norm.running_mean, norm.running_var, training=False),
    "as argument of an in-place function": lambda norm, h: torch.zeros_like(h).add_(norm.running_mean),
    "data": lambda norm, h: norm.running_mean.data,
    "detached": lambda norm, h: norm.running_mean.detach(),
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("place", [Normalized, ReadsBetween])
def test_statistics_are_read(place, read, before):
    compare(
        lambda: place(READS[read], before=before) if place is ReadsBetween else Net(place(READS[read], before=before))
    )


# ---- what is still reused --------------------------------------------------------------------------------------


def reused(opt):
    return {name for name, line in opt.engine_report().items() if "used again" in line}


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        h = super().forward(x)
        return h + 0 * self.running_mean


def test_layer_that_reads_its_own_statistics_runs_again_alone():
    opt = compare(lambda: Net(nn.Sequential(nn.Linear(6, 6), OwnNorm(6), nn.Linear(6, 6))))
    assert reused(opt) == set()  # the sequence holds it
    opt = compare(lambda: TwoBlocks(nn.Linear(6, 6), OwnNorm(6)))
    assert reused(opt) == {"first.weight", "first.bias"}


class TwoBlocks(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second, self.head = first, second, nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.second(self.first(x)))


def test_blocks_beside_a_hooked_one_are_reused():
    def make_model():
        model = Net(nn.Sequential(nn.Sequential(nn.Linear(6, 6)), nn.Sequential(nn.Linear(6, 6), nn.Tanh())))
        model.body[1][0].register_forward_hook(lambda *_: None)
        return model

    assert "body.0.0.weight" in reused(compare(make_model))


def test_module_that_holds_itself():
    def make_model():
        held = {}
        held["itself"] = held
        return Net(Holder(held))

    def body(model, x, y):
        assert x.data is not None
        return loss_of(model, x * 1, y)

    assert "body.layer.weight" in reused(compare(make_model, body=body))


def test_memory_of_freed_tensors_does_not_count():
    def body(model, x, y):
        for _ in range(20):
            (x * 2).numpy()
        return loss_of(model, x, y)

    assert "body.weight" in reused(compare(Net, body=body))


# ---- implicit ascents ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["masked", "full"])
def test_unperturbed_layer_computes_no_weight_gradient_in_an_implicit_ascent(monkeypatch, norm):
    calls = []
    plain = layers._Linear.dw
    monkeypatch.setattr(layers._Linear, "dw", lambda *args: calls.append(1) or plain(*args))
    model = cases.mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[4].parameters(), "perturb": False}]
    mask = sparsesam.random_mask(sparsity=0.5, pattern="filter")
    opt = sparsesam.SSAM(torch.optim.SGD(groups, lr=0.1), model, mask=mask, ascent="implicit-dense", norm=norm)
    cases.with_closure(opt, model, *cases.vectors())
    assert "not perturbed: no weight gradient" in opt.engine_report()["4.weight"]
    assert len(calls) == 0  # no input gradient passes the last layer, so that nothing before it has one
