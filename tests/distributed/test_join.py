"""Ranks with unequal numbers of batches, within torch's Join."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from tests import cases
from tests.distributed import equal_runs
from tests.distributed.processes import run_ranks

KINDS = ("sam", "dynamic", "random", "fixed layers", "fisher filter")


def uneven(rank):
    found = {}
    for kind in KINDS:
        model = DistributedDataParallel(equal_runs.network())
        options = {"norm": "masked"} if kind == "fixed layers" else {}
        opt = equal_runs.optimizer(kind, model, **options)
        equal_runs.train(model, opt, (rank, 2), range(2))
        with Join([model, opt]):
            equal_runs.train(model, opt, (rank, 2), range(2, 5 if rank else 12))
        inside = opt.steps
        equal_runs.train(model, opt, (rank, 2), range(12, 18))
        weights = {name: p.detach() for name, p in model.module.named_parameters()}
        momentum = [state["momentum_buffer"] for state in opt.state.values()]
        found[kind] = (weights, opt.masks, momentum, inside, opt.steps)
    model = DistributedDataParallel(equal_runs.network())
    opt = equal_runs.optimizer("random", model)
    for joinables, told in (([model], "must have the optimizer too"), ([model, opt][::-1], "the model first")):
        with pytest.raises(RuntimeError, match=told), Join(joinables):
            equal_runs.train(model, opt, (rank, 2), range(1))
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(uneven, 2, tmp_path_factory.mktemp("join"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_stops_early_goes_on_with_the_others_state(ranks, kind):
    (weights, masks, momentum, inside, steps), other = (found[kind] for found in ranks)
    assert (inside, steps) == (12, 18) == (other[3], other[4])
    assert cases.same_bits(weights.values(), other[0].values())
    assert all(torch.equal(mask, other[1][name]) for name, mask in masks.items())
    assert cases.same_bits(momentum, other[2])
