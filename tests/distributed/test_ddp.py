"""DistributedDataParallel: any number of ranks takes the steps of one, and sends no more than it must."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import sparsesam
from tests import cases
from tests.distributed import equal_runs
from tests.distributed.counted_bytes import CountedBytes
from tests.distributed.processes import run_ranks

KINDS = list(equal_runs.RULES)


def equal_steps(rank, ranks):
    found = {}
    for kind in KINDS:
        model = DistributedDataParallel(equal_runs.network())
        opt = equal_runs.optimizer(kind, model)
        equal_runs.train(model, opt, (rank, ranks))
        found[kind] = ({name: p.detach() for name, p in model.module.named_parameters()}, opt.masks)
    return found


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    return run_ranks(equal_steps, request.param, tmp_path_factory.mktemp("ddp"), request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_take_the_steps_of_one(ranks, kind):
    equal_runs.assert_equal(ranks[0][kind], kind)
    for other in ranks[1:]:
        assert cases.same_bits(other[kind][0].values(), ranks[0][kind][0].values())


def bytes_of_a_step(model, make, rank):
    """Counted in the third step: DDP arranges its buckets in the first, masks are made there too."""
    opt = make(torch.optim.SGD(model.parameters(), lr=0.1))
    for seed in range(3):
        x, y = (t.chunk(2)[rank] for t in cases.images(16, torch.float64, seed=seed))
        with CountedBytes() as counted:
            opt.step(cases.closure_for(model, opt, x, y))
    return counted.bytes


def bytes_sent(rank):
    sent = {}
    for name, make in {
        "SGD": lambda model: lambda base: base,
        "SAM local": lambda model: lambda base: sparsesam.SAM(base, model, ascent_scope="local"),
        "SAM global": lambda model: lambda base: sparsesam.SAM(base, model),
        "classifier local": lambda model: lambda base: classifier(base, model, ascent_scope="local"),
        "classifier global": lambda model: lambda base: classifier(base, model),
        "classifier, norm of all": lambda model: lambda base: classifier(base, model, norm="full"),
    }.items():
        model = DistributedDataParallel(equal_runs.network())
        sent[name] = bytes_of_a_step(model, make(model), rank)
    return sent


def classifier(base, model, *, norm="masked", **options):
    return sparsesam.SSAM(base, model, mask=sparsesam.fixed_mask("5.*"), norm=norm, **options)


def test_local_sends_what_sgd_sends_and_global_the_perturbed_tensors_too(tmp_path):
    sent = run_ranks(bytes_sent, 2, tmp_path)[0]
    model = equal_runs.network()
    everything, perturbed = (8 * sum(p.numel() for p in part.parameters()) for part in (model, model[5]))
    assert sent == {
        "SGD": everything,
        "SAM local": everything,
        "SAM global": 2 * everything,
        "classifier local": everything,
        "classifier global": everything + perturbed,
        "classifier, norm of all": 2 * everything,
    }


def masks_that_differ(rank):
    model = DistributedDataParallel(equal_runs.network())
    rule = sparsesam.random_mask(sparsity=0.5, refresh=sparsesam.every_steps(2), seed=int(rank == 1))
    opt = sparsesam.SSAM(cases.sgd(model), model, mask=rule)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        equal_runs.train(model, opt, (rank, 3), range(1))
    return opt.masks, [str(one.message) for one in seen if issubclass(one.category, RuntimeWarning)]


def test_masks_that_differ_are_told_by_rank_and_those_of_rank_0_taken(tmp_path):
    found = run_ranks(masks_that_differ, 3, tmp_path)
    model = equal_runs.network()
    opt = sparsesam.SSAM(cases.sgd(model), model, mask=sparsesam.random_mask(sparsity=0.5))
    equal_runs.train(model, opt, steps=range(1))
    for masks, told in found:
        assert all(torch.equal(mask, opt.masks[name]) for name, mask in masks.items())
        assert len(told) == 1
        assert "the masks that rank 1 made differ from rank 0's" in told[0]


def wrapped_late(rank):
    """As trainers do: the optimizer is made first, the model wrapped afterwards."""
    model = equal_runs.network()
    opt = equal_runs.optimizer("fixed layers", model, norm="masked")
    equal_runs.train(DistributedDataParallel(model), opt, (rank, 2))
    return {name: p.detach() for name, p in model.named_parameters()}, opt.masks, opt.engine_report()


def test_a_model_that_is_wrapped_after_the_optimizer_was_made(tmp_path):
    *found, report = run_ranks(wrapped_late, 2, tmp_path)[0]
    equal_runs.assert_equal(found, "fixed layers", norm="masked")
    assert report["engine"] == "on"
    assert "used again" in report["0.weight"]
