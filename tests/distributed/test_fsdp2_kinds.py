"""Kinds of sharding over four ranks: two-dimensional, tensor parallel, ZeRO."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import sparsesam
from sparsesam.distributed.shards import Shards
from sparsesam.masks.patterns import PerLayer, Structured, Unstructured, as_pattern
from sparsesam.masks.select import random_scores
from tests import cases
from tests.distributed import equal_runs
from tests.distributed.counted_bytes import CountedBytes
from tests.distributed.processes import run_ranks
from tests.distributed.test_fsdp2 import sharded

pytestmark = [pytest.mark.xdist_group("ranks"), cases.needs_fsdp2_on_a_cpu]

RANKS = 4
PATTERNS = [
    Unstructured(),
    PerLayer(Unstructured()),
    *map(Structured, ("tensor", "filter", "column")),
    *map(as_pattern, ("2:4", "2:4 input", "3:8", "2:4 filters")),
]


def replicated_and_sharded(rank):
    return equal_runs.steps_of_ranks(rank, RANKS, ["fisher"], lambda model: sharded(model, 2, 2))["fisher"]


def batch_fisher(rank, ranks, wrap):
    model = wrap(equal_runs.network())
    mask = sparsesam.fisher_mask(loss_fn=F.cross_entropy, sparsity=0.5, refresh=3)
    opt = sparsesam.SSAM(cases.sgd(model), model, rho=0.1, mask=mask)
    for seed in range(8):
        x, y = (tensor.chunk(ranks)[rank] for tensor in cases.images(16, torch.float64, seed=seed))
        opt.step(cases.closure_for(model, opt, x, y), batch=(x, y))
    return equal_runs.reached(model, opt)


def batch_fishers(rank):
    return [batch_fisher(rank, RANKS, wrap) for wrap in (lambda model: sharded(model, RANKS), DistributedDataParallel)]


def zero(rank):
    def base(model):
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    return equal_runs.steps_of_ranks(rank, RANKS, ["dynamic"], DistributedDataParallel, base=base)["dynamic"]


def tensor_parallel(rank):
    """Columns of one layer, rows of the next, and a last layer that every rank has whole; all see the whole batch."""
    model = cases.mlp()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)
    return trained_mlp(model)


def trained_mlp(model):
    rule = sparsesam.dynamic_mask(sparsity=0.6, refresh=3, total_steps=10)
    opt = sparsesam.SSAM(cases.sgd(model), model, rho=0.1, mask=rule)
    cases.train(model, opt, range(10))
    return equal_runs.reached(model, opt)


def masks_of(pattern, tensors, **options):
    """A pattern's masks by scores with many ties, at random, and by drop_and_grow."""
    sparsity = None if pattern.implied_sparsity is not None else 0.6
    drawn = pattern.draw(tensors, torch.Generator().manual_seed(3), sparsity, **options)
    grow = torch.Generator().manual_seed(4)
    return [
        pattern.select(tensors, sparsity, **options),
        drawn,
        pattern.drop_and_grow(drawn, tensors, grow, sparsity=sparsity, ratio=0.5, **options),
        pattern.drop_and_grow(drawn, grow, tensors, sparsity=sparsity, ratio=0.3, **options),
    ]


def patterns(rank):
    """Every pattern with uneven shards along each dimension."""
    mesh, found = init_device_mesh("cpu", (RANKS,)), {}
    for dim in (0, 1):
        dims = {name: min(dim, tensor.dim() - 1) for name, tensor in pattern_tensors().items()}
        placed = {name: distribute_tensor(t, mesh, [Shard(dims[name])]) for name, t in pattern_tensors().items()}
        local = {name: tensor.to_local() for name, tensor in placed.items()}
        found[dim] = [
            [{name: gathered(mask, dims[name]) for name, mask in masks.items()} for masks in found_by]
            for found_by in (masks_of(pattern, local, shards=Shards.of(placed)) for pattern in PATTERNS)
        ]
    return found


def pattern_tensors():
    shapes = {"a": (10, 3, 2), "b": (7,), "c": (16, 5), "d": (3, 4), "e": (9, 6)}
    drawn = random_scores(
        {name: torch.empty(shape) for name, shape in shapes.items()}, generator=torch.Generator().manual_seed(1)
    )
    return {name: (one.double() * 8).round() for name, one in drawn.items()}


def gathered(mask, dim=0):
    parts = [None] * RANKS
    dist.all_gather_object(parts, mask)
    return torch.cat(parts, dim)


def bytes_of_a_selection(rank):
    """The weights themselves are not sent, whatever their number."""
    found = []
    for size in (1_000, 100_000):
        scores = torch.rand(size, generator=torch.Generator().manual_seed(size))
        placed = {"w": distribute_tensor(scores, init_device_mesh("cpu", (RANKS,)), [Shard(0)])}
        with CountedBytes() as counted:
            mask = Unstructured().select({"w": placed["w"].to_local()}, 0.5, shards=Shards.of(placed))
        found.append((counted.collectives, counted.bytes, int(gathered(mask["w"]).sum())))
    return found


def refused(rank):
    wrapped = FullyShardedDataParallel(equal_runs.network(), device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(TypeError, match="fully_shard"):
        sparsesam.SAM(cases.sgd(wrapped), wrapped)
    model = sharded(equal_runs.network(), RANKS)
    opt = sparsesam.SSAM(cases.sgd(model), model, mask=sparsesam.random_mask(sparsity=0.5, seed=int(rank == 2)))
    with pytest.raises(RuntimeError, match="of rank 2 differ from rank 0's"):
        equal_runs.train(model, opt, (rank, RANKS), range(1))
    mask, model = sparsesam.random_mask(sparsity=0.5), sharded(equal_runs.network(), RANKS)
    opt = sparsesam.SSAM(cases.sgd(model), model, mask=mask, norm="masked", ascent="implicit")
    with pytest.raises(ValueError, match='ascent must be "explicit" with sharded parameters'):
        equal_runs.train(model, opt, (rank, RANKS), range(1))
    return True


CASES = (replicated_and_sharded, batch_fishers, zero, tensor_parallel, patterns, bytes_of_a_selection, refused)


def every_case(rank):
    return {case.__name__: case(rank) for case in CASES}


@pytest.fixture(scope="module")
def found():
    return run_ranks(every_case, RANKS)[0]


@pytest.mark.parametrize(("case", "kind"), [("replicated_and_sharded", "fisher"), ("zero", "dynamic")])
def test_ranks_equal_one_process(found, case, kind):
    equal_runs.assert_equal(found[case], kind)


def test_batch_fisher_uses_samples_of_all_ranks(found):
    expected = batch_fisher(0, 1, lambda model: model)
    torch.testing.assert_close(found["batch_fishers"], [expected] * 2, rtol=1e-10, atol=1e-10)


def test_tensor_parallel_masks_equal_those_of_whole_weights(found):
    torch.testing.assert_close(found["tensor_parallel"], trained_mlp(cases.mlp()), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("index", range(len(PATTERNS)), ids=map(str, PATTERNS))
def test_patterns_of_shards_equal_those_of_whole_tensors(found, index, dim):
    torch.testing.assert_close(found["patterns"][dim][index], masks_of(PATTERNS[index], pattern_tensors()))


def test_selection_sends_counts_not_scores(found):
    (small, small_bytes, kept), (large, large_bytes, more) = found["bytes_of_a_selection"]
    assert (kept, more) == (500, 50_000)
    assert small == large <= 6
    assert small_bytes == large_bytes < 3 * 2048 * 8 + 100


def test_fsdp1_differing_random_states_and_implicit_ascent_raise(found):
    assert found["refused"]
