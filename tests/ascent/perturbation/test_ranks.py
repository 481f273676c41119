"""One-pass steps on two ranks reach the weights that one rank reaches with the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import sparsesam
from tests import cases
from tests.distributed.processes import run_ranks

pytestmark = pytest.mark.xdist_group("ranks")

MASK = {"sparsity": 0.5, "refresh": 2}
KINDS = {
    "momentum": lambda base, model: sparsesam.SAM(base, model, rho=0.5, ascent="momentum"),
    "extrapolation": lambda base, model: sparsesam.ExtrapolatedSAM(base, model, 5.0),
    "masked extrapolation": lambda base, model: sparsesam.ExtrapolatedSAM(
        base, model, 5.0, mask=sparsesam.dynamic_mask(**MASK)
    ),
}


def train(wrap, part):
    reached = {}
    for kind, make in KINDS.items():
        model = cases.mlp()
        wrapped = wrap(model)
        opt = make(cases.sgd(model), wrapped)
        for seed in range(5):
            opt.step(cases.closure_for(wrapped, opt, *part(cases.vectors(16, seed=seed))))
        reached[kind] = model.state_dict()
    return reached


def replicated(rank):
    return train(DistributedDataParallel, lambda batch: [t.chunk(2)[rank] for t in batch])


def test_two_ranks_equal_one():
    first, second = run_ranks(replicated, 2)
    alone = train(lambda model: model, lambda batch: batch)
    for kind in KINDS:
        assert cases.same_bits(first[kind].values(), second[kind].values())
        torch.testing.assert_close(dict(first[kind]), dict(alone[kind]), rtol=1e-9, atol=1e-11)


def sharded(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    reached = {}
    for kind in ("momentum", "extrapolation"):
        model = cases.mlp()
        mesh = init_device_mesh("cpu", (2,))
        for layer in (model[0], model[2], model[4], model):
            fully_shard(layer, mesh=mesh)
        opt = KINDS[kind](cases.sgd(model), model)
        for seed in range(5):
            x, y = (t.chunk(2)[rank] for t in cases.vectors(16, seed=seed))
            opt.step(cases.closure_for(model, opt, x, y))
        reached[kind] = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return reached


@cases.needs_fsdp2_on_a_cpu
def test_shards_equal_one_rank():
    alone = train(lambda model: model, lambda batch: batch)
    for kind, weights in run_ranks(sharded, 2)[0].items():
        torch.testing.assert_close(dict(weights), dict(alone[kind]), rtol=1e-9, atol=1e-11)
