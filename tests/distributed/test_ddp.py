"""DistributedDataParallel: any number of ranks takes the steps of one, and sends no more than necessary."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import sparsesam
from tests import cases
from tests.distributed import equal_runs
from tests.distributed.counted_bytes import CountedBytes
from tests.distributed.processes import run_ranks

pytestmark = pytest.mark.xdist_group("ranks")


def bytes_sent(rank):
    """Counted in the third step: DDP arranges its buckets in the first, masks are made there too."""
    sent = {}
    for name, make in {
        "SGD": lambda base, model: base,
        "SAM local": functools.partial(sparsesam.SAM, ascent_scope="local"),
        "SAM global": sparsesam.SAM,
        "classifier local": functools.partial(classifier, ascent_scope="local"),
        "classifier global": classifier,
        "classifier, norm of all": functools.partial(classifier, norm="full"),
    }.items():
        model = DistributedDataParallel(equal_runs.network())
        opt = make(torch.optim.SGD(model.parameters(), lr=0.1), model)
        step = cases.with_closure if name == "SGD" else cases.by_minimize
        for seed in range(3):
            batch = (t.chunk(2)[rank] for t in cases.images(16, torch.float64, seed=seed))
            with CountedBytes() as counted:
                step(opt, model, *batch)
        sent[name] = counted.bytes
    return sent


def classifier(base, model, *, norm="masked", **options):
    return sparsesam.SSAM(base, model, mask=sparsesam.fixed_mask("5.*"), norm=norm, **options)


def test_local_ascent_sends_as_much_as_sgd_and_global_perturbed_tensors_too():
    sent = run_ranks(bytes_sent, 2)[0]
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


def differing_masks(rank):
    """The masks of one rank differ at the second refresh; all ranks raise, and continue when they agree again."""
    model = DistributedDataParallel(equal_runs.network())
    rule = sparsesam.random_mask(sparsity=0.5, refresh=2)
    opt = sparsesam.SSAM(cases.sgd(model), model, mask=rule)
    equal_runs.train(model, opt, (rank, 4), range(2))
    state, before, weights = opt.state_dict(), opt.masks, cases.weights_of(model)
    opt.load_state_dict(equal_runs.reseeded(state, int(rank == 1)))
    message = r"the masks of rank 1 differ from rank 0's; .* same arguments, seed and data"
    with pytest.raises(RuntimeError, match=message):
        equal_runs.train(model, opt, (rank, 4), range(2, 3))
    assert cases.same_bits(weights, model.parameters())
    assert cases.same_bits(before.values(), opt.masks.values())
    opt.load_state_dict(state)
    equal_runs.train(model, opt, (rank, 4), range(2, 4))
    return opt.steps, [p.detach() for p in model.parameters()]


def test_differing_masks_raise_on_all_ranks_and_name_rank():
    found = run_ranks(differing_masks, 4)
    assert [steps for steps, _ in found] == [4, 4, 4, 4]
    assert all(cases.same_bits(found[0][1], weights) for _, weights in found)


def local_and_fisher_of_parts(rank):
    found = {}
    for kind in ("dynamic", "dynamic filter"):
        model = DistributedDataParallel(equal_runs.network())
        opt = equal_runs.optimizer(kind, model, ascent_scope="local")
        equal_runs.train(model, opt, (rank, 2))
        found[kind] = list(opt.masks.values())
    data = tuple(part.chunk(2)[rank] for part in cases.images(32, torch.float64))
    found["fisher of parts"] = fisher_of(data, 16, DistributedDataParallel(equal_runs.network()), (rank, 2))
    return found


def fisher_of(data, samples, model, share=(0, 1)):
    rule = sparsesam.fisher_mask(data, torch.nn.functional.cross_entropy, sparsity=0.5, samples=samples)
    opt = sparsesam.SSAM(cases.sgd(model), model, rho=0.1, mask=rule)
    equal_runs.train(model, opt, share, range(1))
    return list(opt.masks.values())


@pytest.fixture(scope="module")
def made_from_different_data():
    return run_ranks(local_and_fisher_of_parts, 2)


@pytest.mark.parametrize("kind", ["dynamic", "dynamic filter", "fisher of parts"])
def test_masks_use_gradients_of_all_ranks(made_from_different_data, kind):
    one, other = made_from_different_data
    assert cases.same_bits(one[kind], other[kind])


def test_fisher_uses_data_of_all_ranks(made_from_different_data):
    expected = fisher_of(cases.images(32, torch.float64), 32, equal_runs.network())
    assert cases.same_bits(expected, made_from_different_data[0]["fisher of parts"])


def wrapped_late(rank):
    """As in trainers: the optimizer is created first, the model wrapped afterwards."""
    model = equal_runs.network()
    opt = equal_runs.optimizer("fixed layers", model, norm="masked")
    wrapped = DistributedDataParallel(model)
    for seed in range(equal_runs.STEPS):
        cases.by_minimize(opt, wrapped, *(t.chunk(2)[rank] for t in cases.images(16, torch.float64, seed=seed)))
    return *equal_runs.reached(model, opt), opt.savings()


def test_model_wrapped_after_optimizer():
    *found, savings = run_ranks(wrapped_late, 2)[0]
    equal_runs.assert_equal(found, "fixed layers", norm="masked")
    assert savings.gradients == 0  # it would wait for them
