"""fully_shard with bfloat16 products and weights offloaded: two ranks train as one process with the same casts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn import functional as F

from tests import cases
from tests.distributed import equal_runs
from tests.distributed.processes import run_ranks
from tests.distributed.test_fsdp2 import sharded

pytestmark = [pytest.mark.xdist_group("ranks"), cases.needs_fsdp2_on_a_cpu]

KINDS = list(equal_runs.RULES)
STEPS = 10
OPTIONS = {
    "mixed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}
OPTIONS["mixed, offloaded"] = OPTIONS["mixed"] | OPTIONS["offloaded"]


def network(way):
    return equal_runs.network().to(torch.float32 if "mixed" in way else torch.float64)


def halves(seed, way):
    x, y = cases.images(16, torch.float32 if "mixed" in way else torch.float64, seed=seed)
    return list(zip(x.chunk(2), y.chunk(2), strict=True))


def train_sharded(rank):
    found = {}
    for way, options in OPTIONS.items():
        for kind in KINDS:
            model = sharded(network(way), 2, **options)
            opt = equal_runs.optimizer(kind, model)
            for seed in range(STEPS):
                x, y = halves(seed, way)[rank]
                before = [p.to_local().clone() for p in model.parameters()]
                cases.both_passes(opt, model, x, y)
                assert cases.same_bits(before, [p.to_local() for p in model.parameters()])
                opt.step()
            found[way, kind] = equal_runs.reached(model, opt)
    return found


class CastConv2d(nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())


class CastLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())


def alone(kind, way):
    """One process, which adds up the gradients of both halves of a batch in the weights' precision."""
    model = network(way)
    if "mixed" in way:
        model[0].__class__ = model[2].__class__ = CastConv2d
        model[5].__class__ = CastLinear
    start = cases.weights_of(model)
    opt = equal_runs.optimizer(kind, model, engine=False)

    def backward(seed):
        for x, y in halves(seed, way):
            F.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad.div_(2)

    for seed in range(STEPS):
        opt.zero_grad()
        backward(seed)
        with opt.perturbed():
            backward(seed)
        opt.step()
    return start, cases.weights_of(model), opt.masks


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(train_sharded, 2)


def difference(found, expected):
    return torch.cat([(one - other).flatten() for one, other in zip(found, expected, strict=True)]).norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", OPTIONS)
def test_two_ranks_equal_one_process(ranks, way, kind):
    """A weight at w + e may round to another bfloat16 there: that explains up to 2 % of the way, a wrong mask more."""
    weights, masks = ranks[0][way, kind]
    start, expected, expected_masks = alone(kind, way)
    tolerance, overlap = (0.02, 0.95) if "mixed" in way else (1e-10, 1.0)
    assert difference(weights.values(), expected) <= tolerance * difference(start, expected)
    kept = sum(int(mask.sum()) for mask in expected_masks.values())
    assert sum(int(mask.sum()) for mask in masks.values()) == kept
    assert sum(int((mask & expected_masks[name]).sum()) for name, mask in masks.items()) >= overlap * kept
    assert cases.same_bits(weights.values(), ranks[1][way, kind][0].values())
