"""Ranks with unequal numbers of batches, within torch's Join."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from tests import cases
from tests.distributed import equal_runs
from tests.distributed.processes import run_ranks

pytestmark = pytest.mark.xdist_group("ranks")

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
        found[kind] = (weights, opt.masks, momentum, inside, opt.steps, opt.engine_report()["engine"])
        if kind == "random":  # compared again, after Join
            opt.load_state_dict(equal_runs.reseeded(opt.state_dict(), rank))
            with pytest.raises(RuntimeError, match="the masks of rank 1 differ"):
                equal_runs.train(model, opt, (rank, 2), range(18, 22))
    model = DistributedDataParallel(equal_runs.network())
    opt = equal_runs.optimizer("random", model)
    wrong = [([model], "must have the optimizer too"), ([model, opt][::-1], "the model first")]
    for round_ in range(2):
        for joinables, message in wrong:
            with pytest.raises(RuntimeError, match=message), Join(joinables):
                equal_runs.train(model, opt, (rank, 2), range(1))
        if round_ == 0:  # also after a correct Join
            with Join([model, opt]):
                equal_runs.train(model, opt, (rank, 2), range(3 + rank))
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(uneven, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_rank_that_stops_early_gets_state_of_others(ranks, kind):
    (weights, masks, momentum, inside, steps, _), other = (found[kind] for found in ranks)
    assert (inside, steps) == (12, 18) == (other[3], other[4])
    assert cases.same_bits(weights.values(), other[0].values())
    assert all(torch.equal(mask, other[1][name]) for name, mask in masks.items())
    assert cases.same_bits(momentum, other[2])


def test_engine_works_after_join(ranks):
    assert [found["fixed layers"][5] for found in ranks] == ["on", "on"]


def entered_twice(rank):
    model = DistributedDataParallel(equal_runs.network())
    opt = equal_runs.optimizer("sam", model)
    join = Join([model, opt])
    with join:
        equal_runs.train(model, opt, (rank, 2), range(2))
    with join:
        equal_runs.train(model, opt, (rank, 2), range(2 + rank))


def test_entering_join_twice_raises():
    with pytest.raises(RuntimeError, match=r"a Join must not be entered twice|Connection closed|reset by peer"):
        run_ranks(entered_twice, 2)
