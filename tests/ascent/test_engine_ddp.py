"""The engine under DistributedDataParallel: active on every rank, with the result of two plain passes."""

from __future__ import annotations

import contextlib
import random
from functools import partial

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import sparsesam
from sparsesam.ascent.engine import READS_GRADIENTS
from tests import cases
from tests.cases import in_two_phases, with_closure
from tests.distributed.processes import run_ranks

pytestmark = pytest.mark.xdist_group("ranks")


class Summed(torch.autograd.Function):
    """The sum over ranks, whose gradient is the sum of the ranks' gradients; stands for torch's own."""

    __module__ = "torch.nn.modules._functions"

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's own refuses tensors on a CPU; this is its arithmetic, with collectives in forward and backward.

    DistributedDataParallel refuses it on a CPU as well, so that the layers of a wrapped model are turned into it.
    """

    def forward(self, x):
        count = dist.get_world_size() * len(x)
        mean = Summed.apply(x.sum(0)) / count
        variance = Summed.apply((x - mean).square().sum(0)) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance, self.momentum)
            self.num_batches_tracked.add_(1)
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias

    forward.__module__ = nn.SyncBatchNorm.__module__


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.middle, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.middle(self.body(x)))


class WithUnused(Net):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(3, 3)


class HookOnOneRank(Net):
    """As for a logger on the first rank: it computes everything, and must not block the others."""

    def __init__(self):
        super().__init__()
        for parameter in self.parameters() if dist.get_rank() == 0 else ():
            parameter.register_hook(lambda gradient: None)


class CountingOnOneRank(SyncBatchNorm):
    """Changes an attribute, so that its output cannot be reused there; the other ranks must run it too."""

    calls = 0

    def forward(self, x):
        if dist.get_rank() == 1:
            self.calls += 1
        return super().forward(x)

    forward.__module__ = nn.SyncBatchNorm.__module__


class DrawingOnOneRank(SyncBatchNorm):
    """After a draw from Python's generator nothing of the first pass is reused there."""

    def forward(self, x):
        if dist.get_rank() == 1:
            random.random()
        return super().forward(x)

    forward.__module__ = nn.SyncBatchNorm.__module__


def accumulated(opt, model, x, y):
    """Two micro-batches; gradients are synchronized with the last one."""
    opt.zero_grad()
    parts = list(zip(x.chunk(2), y.chunk(2), strict=True))
    with opt.first_pass():
        run_parts(model, parts)
    with opt.perturbed():
        run_parts(model, parts)
    opt.step()


def clipped(opt, model, x, y):
    """The norm must be that of the averaged gradient, in both passes."""
    clip = partial(nn.utils.clip_grad_norm_, model.parameters(), 0.05)
    opt.step(cases.closure_for(model, opt, x, y, then=clip))


def inspected_on_one_rank(opt, model, x, y):
    def look():
        if dist.get_rank() == 0:
            model.module.head.weight.grad.norm()

    opt.step(cases.closure_for(model, opt, x, y, then=look))


def run_parts(model, parts):
    for number, (x, y) in enumerate(parts):
        with model.no_sync() if number == 0 else contextlib.nullcontext():
            (F.cross_entropy(model(x), y) / 2).backward()


LAST = {"mask": ("head.*",), "norm": "masked"}
CASES = {
    "default": (Net, {}, with_closure, LAST),
    "two phases": (Net, {}, in_two_phases, LAST),
    "clipped": (Net, {}, clipped, LAST),
    "one rank reads gradients": (Net, {}, inspected_on_one_rank, LAST),
    "hook on one rank": (HookOnOneRank, {}, with_closure, LAST),
    "hook on one rank, two phases": (HookOnOneRank, {}, in_two_phases, LAST),
    "full norm": (Net, {}, with_closure, {**LAST, "norm": "full"}),
    "local ascent": (Net, {}, with_closure, {**LAST, "ascent_scope": "local"}),
    "no broadcast": (Net, {"broadcast_buffers": False}, with_closure, LAST),
    "static graph": (Net, {"static_graph": True}, with_closure, LAST),
    "unused parameters": (WithUnused, {"find_unused_parameters": True}, with_closure, LAST),
    "no_sync": (Net, {}, accumulated, LAST),
    "SyncBatchNorm": (Net, {}, with_closure, LAST),
    "SyncBatchNorm, one rank differs": (Net, {}, with_closure, LAST),
    "SyncBatchNorm, one rank draws": (Net, {}, with_closure, LAST),
}
SYNCHRONIZED = {
    "SyncBatchNorm": SyncBatchNorm,
    "SyncBatchNorm, one rank differs": CountingOnOneRank,
    "SyncBatchNorm, one rank draws": DrawingOnOneRank,
}


def train(name, rank, *, engine):
    make, wrapping, loop, options = CASES[name]
    torch.manual_seed(0)
    model = DistributedDataParallel(make().double(), **wrapping)
    if name in SYNCHRONIZED:
        model.module.body[1].__class__ = SYNCHRONIZED[name]
    mask = sparsesam.fixed_mask(*options["mask"])
    rest = {key: value for key, value in options.items() if key != "mask"}
    opt = sparsesam.SSAM(cases.sgd(model), model, rho=0.3, mask=mask, engine=engine, **rest)
    for seed in range(4):
        x, y = (tensor.chunk(2)[rank] for tensor in cases.vectors(16, seed=seed))
        loop(opt, model, x, y)
    # Running statistics are each rank's own until the next forward.
    return list(model.module.state_dict().values()), opt.engine_report()


def train_all(rank):
    return {name: [train(name, rank, engine=engine) for engine in (True, False)] for name in CASES}


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(train_all, 2)


@pytest.mark.parametrize("name", CASES)
def test_result_equals_two_plain_passes(ranks, name):
    for found in ranks:
        (values, report), (plain, _) = found[name]
        assert report["engine"].startswith("on")
        torch.testing.assert_close(values, plain, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_unperturbed_prefix_is_reused(ranks, name):
    computed_in_full = ("full norm", "clipped", "one rank reads gradients")
    for rank, found in enumerate(ranks):
        report = found[name][0][1]
        if name.startswith("hook on one rank") and rank == 0:
            assert "a gradient hook is registered on body.0.weight" in report["engine"]
            continue
        again = [part for part in ("body.0", "body.1", "middle.0") if "used again" in report[f"{part}.weight"]]
        if name == "no_sync" or (name in computed_in_full and torch.__version__ < "2.11"):
            assert again == []
            assert report["engine"].startswith("on, but the second pass was computed in full")
        elif name == "SyncBatchNorm, one rank differs":
            assert again == ["middle.0"]  # on both ranks
        elif name == "SyncBatchNorm, one rank draws":
            assert "body.1" not in again  # on both ranks
        else:
            assert again == ["body.0", "body.1", "middle.0"]
            in_full = f"on, but the first backward was computed in full: {READS_GRADIENTS}"
            assert report["engine"] == (in_full if name in ("clipped", "one rank reads gradients") else "on")
        if name not in computed_in_full:
            assert report["body.0.weight"].startswith("not perturbed: no weight gradient")


def refusal(rank):
    model = DistributedDataParallel(Net().double(), static_graph=True)
    with pytest.raises(ValueError, match="must not have static_graph=True") as error:
        sparsesam.SAM(cases.sgd(model), model, ascent_scope="local")
    return str(error.value)


def test_static_graph_with_local_ascent_raises():
    assert all("ascent_scope" in words for words in run_ranks(refusal, 2))


def sharded(rank):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Net().double()
    fully_shard(model)
    groups = [{"params": list(model.body.parameters()), "perturb": False}]
    groups.append({"params": [*model.middle.parameters(), *model.head.parameters()]})
    opt = sparsesam.SAM(torch.optim.SGD(groups, lr=0.1), model)
    with_closure(opt, model, *(tensor.chunk(2)[rank] for tensor in cases.vectors(16)))
    return opt.engine_report()["engine"]


@cases.needs_fsdp2_on_a_cpu
def test_sharded_parameters_disable_engine_and_are_reported():
    assert all(words.startswith("off: parameters are sharded (fully_shard") for words in run_ranks(sharded, 2))
