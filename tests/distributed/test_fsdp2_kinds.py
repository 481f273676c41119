"""Kinds of sharding over four ranks: offloaded, two-dimensional, tensor parallel, ZeRO."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
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
from tests.distributed.test_fsdp2 import sharded, whole

pytestmark = [pytest.mark.xdist_group("ranks"), cases.needs_fsdp2_on_a_cpu]

RANKS = 4
PATTERNS = [
    Unstructured(),
    PerLayer(Unstructured()),
    *map(Structured, ("tensor", "filter", "column")),
    *map(as_pattern, ("2:4", "2:4 input", "3:8", "2:4 filters")),
]


def offloaded(rank):
    model = sharded(equal_runs.network(), RANKS, offload_policy=CPUOffloadPolicy(pin_memory=False))
    opt = equal_runs.optimizer("dynamic", model)
    equal_runs.train(model, opt, (rank, RANKS))
    return whole(model, opt)


def replicated_and_sharded(rank):
    model = equal_runs.network()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in (model[0], model[2], model[5], model):
        fully_shard(layer, mesh=mesh)
    opt = equal_runs.optimizer("fisher", model)
    equal_runs.train(model, opt, (rank, RANKS))
    return whole(model, opt)


def last_layer_reused(rank):
    """The last rank holds none of the perturbed weights, and must not differ from the others."""
    model = sharded(equal_runs.network(), RANKS)
    opt = equal_runs.optimizer("fixed layers", model, every=3, off_steps="reuse")
    equal_runs.train(model, opt, (rank, RANKS))
    return whole(model, opt)


def batch_fisher_rule():
    return sparsesam.fisher_mask(loss_fn=F.cross_entropy, sparsity=0.5, refresh=3)


def batch_fisher(rank, ranks, wrap):
    model = wrap(equal_runs.network())
    opt = sparsesam.SSAM(cases.sgd(model), model, rho=0.1, mask=batch_fisher_rule())
    for seed in range(8):
        x, y = (tensor.chunk(ranks)[rank] for tensor in cases.images(16, torch.float64, seed=seed))
        opt.step(cases.closure_for(model, opt, x, y), batch=(x, y))
    return model, opt


def batch_fisher_sharded(rank):
    return whole(*batch_fisher(rank, RANKS, lambda model: sharded(model, RANKS)))


def batch_fisher_ddp(rank):
    model, opt = batch_fisher(rank, RANKS, DistributedDataParallel)
    return {name: p.detach() for name, p in model.module.named_parameters()}, opt.masks


def zero(rank):
    model = DistributedDataParallel(equal_runs.network())
    base = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    opt = equal_runs.optimizer("dynamic", model, base=lambda _: base)
    equal_runs.train(model, opt, (rank, RANKS))
    return {name: p.detach() for name, p in model.module.named_parameters()}, opt.masks


def tensor_parallel(rank):
    """Columns of one layer, rows of the next, and a last layer that every rank has whole; all see the whole batch."""
    model = cases.mlp()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)
    opt = mlp_optimizer(model)
    for seed in range(10):
        opt.step(cases.closure_for(model, opt, *cases.vectors(seed=seed)))
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    masks = [m.full_tensor() if hasattr(m, "full_tensor") else m for m in opt.masks.values()]
    return [one.detach() for one in full], masks


def mlp_optimizer(model):
    rule = sparsesam.dynamic_mask(sparsity=0.6, refresh=3, total_steps=10)
    return sparsesam.SSAM(cases.sgd(model), model, rho=0.1, mask=rule)


def patterns(rank):
    """Every pattern by scores with many ties, at random, and by drop_and_grow, with uneven shards."""
    return {dim: patterns_sharded_along(dim) for dim in (0, 1)}


def patterns_sharded_along(dim):
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (RANKS,))
    tensors = pattern_tensors()
    dims = {name: min(dim, one.dim() - 1) for name, one in tensors.items()}
    placed = {name: distribute_tensor(one, mesh, [Shard(dims[name])]) for name, one in tensors.items()}
    shards = Shards.of(placed)
    local = {name: one.to_local() for name, one in placed.items()}
    found = []
    for pattern in PATTERNS:
        sparsity = None if pattern.implied_sparsity is not None else 0.6
        masks = [
            pattern.select(local, sparsity, shards=shards),
            pattern.draw(local, torch.Generator().manual_seed(3), sparsity, shards=shards),
        ]
        keep, grow = local, torch.Generator().manual_seed(4)
        masks.append(pattern.drop_and_grow(masks[1], keep, grow, sparsity=sparsity, ratio=0.5, shards=shards))
        masks.append(pattern.drop_and_grow(masks[1], grow, keep, sparsity=sparsity, ratio=0.3, shards=shards))
        found.append([{name: gathered(mask, dims[name]) for name, mask in one.items()} for one in masks])
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
    from torch.distributed.tensor import Shard, distribute_tensor

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


CASES = (
    *(offloaded, replicated_and_sharded, last_layer_reused, batch_fisher_sharded, batch_fisher_ddp),
    *(zero, tensor_parallel, patterns, bytes_of_a_selection, refused),
)


def every_case(rank):
    return {case.__name__: case(rank) for case in CASES}


@pytest.fixture(scope="module")
def found():
    return run_ranks(every_case, RANKS)[0]


@pytest.mark.parametrize(
    ("case", "kind", "options"),
    [
        ("offloaded", "dynamic", {}),
        ("replicated_and_sharded", "fisher", {}),
        ("zero", "dynamic", {}),
        ("last_layer_reused", "fixed layers", {"every": 3, "off_steps": "reuse"}),
    ],
)
def test_ranks_equal_one_process(found, case, kind, options):
    equal_runs.assert_equal(found[case], kind, **options)


@pytest.mark.parametrize("case", ["batch_fisher_sharded", "batch_fisher_ddp"])
def test_batch_fisher_uses_samples_of_all_ranks(found, case):
    model, opt = batch_fisher(0, 1, lambda model: model)
    torch.testing.assert_close(found[case][0], dict(model.named_parameters()), rtol=1e-10, atol=1e-10)
    assert all(torch.equal(mask, opt.masks[name]) for name, mask in found[case][1].items())


def test_tensor_parallel_masks_equal_those_of_whole_weights(found):
    model = cases.mlp()
    opt = mlp_optimizer(model)
    for seed in range(10):
        opt.step(cases.closure_for(model, opt, *cases.vectors(seed=seed)))
    weights, masks = found["tensor_parallel"]
    torch.testing.assert_close(weights, cases.weights_of(model), rtol=1e-10, atol=1e-10)
    assert cases.same_bits(masks, opt.masks.values())


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("index", range(len(PATTERNS)), ids=map(str, PATTERNS))
def test_patterns_of_shards_equal_those_of_whole_tensors(found, index, dim):
    pattern, whole = PATTERNS[index], pattern_tensors()
    sparsity = None if pattern.implied_sparsity is not None else 0.6
    expected = [pattern.select(whole, sparsity), pattern.draw(whole, torch.Generator().manual_seed(3), sparsity)]
    keep, grow = whole, torch.Generator().manual_seed(4)
    expected.append(pattern.drop_and_grow(expected[1], keep, grow, sparsity=sparsity, ratio=0.5))
    expected.append(pattern.drop_and_grow(expected[1], grow, keep, sparsity=sparsity, ratio=0.3))
    for mine, theirs in zip(found["patterns"][dim][index], expected, strict=True):
        assert all(torch.equal(mine[name], mask) for name, mask in theirs.items())


def test_selection_sends_counts_not_scores(found):
    (small, small_bytes, kept), (large, large_bytes, more) = found["bytes_of_a_selection"]
    assert (kept, more) == (500, 50_000)
    assert small == large <= 6
    assert small_bytes == large_bytes < 3 * 2048 * 8 + 100


def test_fsdp1_differing_random_states_and_implicit_ascent_raise(found):
    assert found["refused"]
