"""What is left out under DistributedDataParallel: the result is that of two plain passes, on every rank."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import sparsesam
from sparsesam.replay import Tape
from tests import cases
from tests.cases import by_minimize, with_closure
from tests.distributed.processes import run_ranks

pytestmark = pytest.mark.xdist_group("ranks")


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's own refuses tensors on a CPU; this is its arithmetic, with collectives in forward and backward.

    DistributedDataParallel refuses it on a CPU as well, so that the layers of a wrapped model are turned into it.
    """

    def forward(self, x):
        count = dist.get_world_size() * len(x)
        mean = all_reduce(x.sum(0)) / count
        variance = all_reduce((x - mean).square().sum(0)) / count
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


LAST = {"mask": sparsesam.fixed_mask("head.*")}
FILTERS = {"mask": sparsesam.random_mask(sparsity=0.5, pattern="filter")}
IMPLICIT = {**FILTERS, "ascent": "implicit"}
#: Options of DistributedDataParallel, a way to take a step, and options of the optimizer.
CASES = {
    "default": ({}, by_minimize, LAST),
    "closure": ({}, with_closure, LAST),
    "two phases": ({}, partial(cases.in_two_phases, narrows=True), LAST),
    "list": ({}, by_list, LAST),
    "clipped": ({}, clipped, LAST),
    "hook on one rank": ({}, by_minimize, LAST),
    "full norm": ({}, by_minimize, {**LAST, "norm": "full"}),
    "filters": ({}, by_minimize, FILTERS),
    "implicit": ({}, by_minimize, IMPLICIT),
    "implicit, closure": ({}, with_closure, IMPLICIT),
    "local ascent": ({}, by_minimize, {**LAST, "ascent_scope": "local"}),
    "local ascent, closure": ({}, with_closure, {**LAST, "ascent_scope": "local"}),
    "no broadcast": ({"broadcast_buffers": False}, by_minimize, LAST),
    "static graph": ({"static_graph": True}, by_minimize, LAST),
    "bucket views": ({"gradient_as_bucket_view": True}, by_minimize, LAST),
    "unused parameters": ({"find_unused_parameters": True}, by_minimize, LAST),
    "no_sync": ({}, accumulated, LAST),
    "communication hook": ({}, by_minimize, LAST),
    "SyncBatchNorm": ({}, by_minimize, LAST),
}


def train(name, rank, *, engine):
    wrapping, loop, options = CASES[name]
    torch.manual_seed(0)
    net = Net()
    if name == "unused parameters":
        net.unused = nn.Linear(3, 3)
    if name == "hook on one rank" and rank == 0:  # as for a logger
        net.head.weight.register_hook(lambda gradient: None)
    model = DistributedDataParallel(net.double(), **wrapping)
    if name == "SyncBatchNorm":
        net.body[1].__class__ = SyncBatchNorm
    if name == "communication hook":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    opt = cases.ssam(model, **{"engine": engine or "ascent" in options, **options})
    for seed in range(4):
        x, y = (tensor.chunk(2)[rank] for tensor in cases.vectors(16, seed=seed))
        loop(opt, model, x, y)
    # Running statistics are each rank's own until the next forward.
    return list(net.state_dict().values()), opt.savings()


def train_all(rank):
    return {name: [train(name, rank, engine=engine) for engine in (True, False)] for name in CASES}


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(train_all, 2)


FULL = ("closure", "clipped", "full norm", "static graph", "no_sync", "communication hook")
NOT_REUSED = ("list", "filters", "implicit", "implicit, closure")


@pytest.mark.parametrize("name", CASES)
def test_result_equals_two_plain_passes_and_work_is_left_out(ranks, name):
    for found in ranks:
        (values, savings), (plain, _) = found[name]
        assert cases.same_bits(values, plain)
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


def refused(rank):
    model = DistributedDataParallel(Net().double())
    opt = sparsesam.SAM(cases.sgd(model), model)
    with pytest.raises(RuntimeError, match="give all ranks the same number of batches"), Join([model]):
        by_minimize(opt, model, *cases.vectors(8))
    model = DistributedDataParallel(Net().double(), static_graph=True)
    with pytest.raises(ValueError, match=r"must not have static_graph=True with ascent_scope"):
        sparsesam.SAM(cases.sgd(model), model, ascent_scope="local")
    return True


def test_join_and_static_graph_with_local_ascent_raise_with_remedy():
    assert run_ranks(refused, 2) == [True, True]


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
