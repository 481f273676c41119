"""What is left out under DistributedDataParallel: the result is that of two plain passes, on every rank."""

from __future__ import annotations

import contextlib
import random
from functools import partial

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import sparsesam
from sparsesam.replay import Tape
from tests import cases
from tests.cases import by_minimize, with_closure
from tests.distributed.processes import run_ranks

pytestmark = pytest.mark.xdist_group("ranks")


class Summed(torch.autograd.Function):
    """The sum over ranks, whose gradient is the sum of the ranks' gradients."""

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
    """As for a logger on the first rank."""

    def __init__(self):
        super().__init__()
        for parameter in self.parameters() if dist.get_rank() == 0 else ():
            parameter.register_hook(lambda gradient: None)


class CountingOnOneRank(SyncBatchNorm):
    """Changes an attribute on one rank."""

    calls = 0

    def forward(self, x):
        self.calls += dist.get_rank()
        return super().forward(x)


class DrawingOnOneRank(SyncBatchNorm):
    """Draws from Python's generator on one rank."""

    def forward(self, x):
        if dist.get_rank() == 1:
            random.random()
        return super().forward(x)


def by_list(opt, model, x, y):
    parts = zip(x.chunk(2), y.chunk(2), strict=True)
    opt.minimize([lambda a=a, b=b: F.cross_entropy(model(a), b) / 2 for a, b in parts])


def accumulated(opt, model, x, y):
    """Two micro-batches; gradients are synchronized with the last one."""
    opt.zero_grad()
    parts = list(zip(x.chunk(2), y.chunk(2), strict=True))
    for phase in (opt.first_pass, opt.perturbed):
        with phase():
            for number, (a, b) in enumerate(parts):
                with model.no_sync() if number == 0 else contextlib.nullcontext():
                    (F.cross_entropy(model(a), b) / 2).backward()
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


in_two_phases = partial(cases.in_two_phases, narrows=True)
LAST = {"mask": sparsesam.fixed_mask("head.*")}
FILTERS = {"mask": sparsesam.random_mask(sparsity=0.5, pattern="filter")}
IMPLICIT = {**FILTERS, "ascent": "implicit"}
CASES = {
    "default": (Net, {}, by_minimize, LAST),
    "closure": (Net, {}, with_closure, LAST),
    "two phases": (Net, {}, in_two_phases, LAST),
    "list": (Net, {}, by_list, LAST),
    "clipped": (Net, {}, clipped, LAST),
    "one rank reads gradients": (Net, {}, inspected_on_one_rank, LAST),
    "hook on one rank": (HookOnOneRank, {}, by_minimize, LAST),
    "hook on one rank, two phases": (HookOnOneRank, {}, in_two_phases, LAST),
    "full norm": (Net, {}, by_minimize, {**LAST, "norm": "full"}),
    "filters": (Net, {}, by_minimize, FILTERS),
    "implicit": (Net, {}, by_minimize, IMPLICIT),
    "implicit, closure": (Net, {}, with_closure, IMPLICIT),
    "local ascent": (Net, {}, by_minimize, {**LAST, "ascent_scope": "local"}),
    "local ascent, closure": (Net, {}, with_closure, {**LAST, "ascent_scope": "local"}),
    "no broadcast": (Net, {"broadcast_buffers": False}, by_minimize, LAST),
    "static graph": (Net, {"static_graph": True}, by_minimize, LAST),
    "bucket views": (Net, {"gradient_as_bucket_view": True}, by_minimize, LAST),
    "unused parameters": (WithUnused, {"find_unused_parameters": True}, by_minimize, LAST),
    "no_sync": (Net, {}, accumulated, LAST),
    "communication hook": (Net, {}, by_minimize, LAST),
}
SYNCHRONIZED = {
    "SyncBatchNorm": SyncBatchNorm,
    "SyncBatchNorm, one rank differs": CountingOnOneRank,
    "SyncBatchNorm, one rank draws": DrawingOnOneRank,
}
CASES |= dict.fromkeys(SYNCHRONIZED, CASES["default"])


def train(name, rank, *, engine):
    make, wrapping, loop, options = CASES[name]
    torch.manual_seed(0)
    model = DistributedDataParallel(make().double(), **wrapping)
    if name in SYNCHRONIZED:
        model.module.body[1].__class__ = SYNCHRONIZED[name]
    if name == "communication hook":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    opt = cases.ssam(model, **{"engine": engine or "ascent" in options, **options})
    for seed in range(4):
        x, y = (tensor.chunk(2)[rank] for tensor in cases.vectors(16, seed=seed))
        loop(opt, model, x, y)
    # Running statistics are each rank's own until the next forward.
    return list(model.module.state_dict().values()), opt.savings()


def train_all(rank):
    return {name: [train(name, rank, engine=engine) for engine in (True, False)] for name in CASES}


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(train_all, 2)


@pytest.mark.parametrize("name", CASES)
def test_result_equals_two_plain_passes(ranks, name):
    for found in ranks:
        (values, _), (plain, _) = found[name]
        assert cases.same_bits(values, plain)


FULL = ("closure", "clipped", "one rank reads gradients", "full norm", "static graph", "no_sync", "communication hook")
NOT_REUSED = ("list", "filters", "implicit", "implicit, closure")


@pytest.mark.parametrize("name", CASES)
def test_work_is_left_out(ranks, name):
    for found in ranks:
        savings = found[name][0][1]
        assert (savings.gradients == 0) == (name in (*FULL, "implicit, closure", "local ascent, closure"))
        assert (savings.reused == 0) == (name in NOT_REUSED), savings


def with_collective(rank):
    x = torch.ones(2, requires_grad=True)
    weight = nn.Parameter(torch.ones(2))
    tape, results = Tape({"weight": weight}), []
    for context in (tape.recording, tape.replaying):
        with context():
            h = torch.exp(x)
            shared = h.detach() * (rank + 1 + len(results))
            dist.all_reduce(shared)
            results.append((h + shared * weight).detach())
    return results, tape.reused, tape.ended


def test_collectives_always_run():
    for results, _, ended in run_ranks(with_collective, 2):
        e = torch.exp(torch.ones(2))
        assert torch.equal(results[0], e + e * 3)
        assert torch.equal(results[1], e + (e * 2 + e * 3))
        assert "c10d" in ended or "other arguments" in ended


def joined(rank):
    model = DistributedDataParallel(Net().double())
    opt = sparsesam.SAM(cases.sgd(model), model)
    with pytest.raises(RuntimeError, match="give all ranks the same number of batches"), Join([model]):
        by_minimize(opt, model, *cases.vectors(8))
    return True


def test_join_raises_with_remedy():
    assert run_ranks(joined, 2) == [True, True]


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
    by_minimize(opt, model, *(tensor.chunk(2)[rank] for tensor in cases.vectors(16)))
    return opt.savings()


@cases.needs_fsdp2_on_a_cpu
def test_sharded_parameters_leave_nothing_out_and_are_reported():
    for savings in run_ranks(sharded, 2):
        assert (savings.gradients, savings.reused) == (0, 0)
        assert "parameters are sharded (fully_shard" in savings.ended
