"""Any number of ranks takes the steps of one process, with whole or sharded weights."""

from __future__ import annotations

import pytest
from torch.nn.parallel import DistributedDataParallel

from tests import cases
from tests.distributed import equal_runs
from tests.distributed.processes import run_ranks
from tests.distributed.test_fsdp2 import sharded

pytestmark = pytest.mark.xdist_group("ranks")

KINDS = list(equal_runs.MASKS)


def equal_steps(rank, ranks, way, kinds):
    wrap = DistributedDataParallel if way == "ddp" else lambda model: sharded(model, ranks)
    return equal_runs.steps_of_ranks(rank, ranks, kinds, wrap)


@pytest.fixture(scope="module", params=["ddp", pytest.param("fsdp2", marks=cases.needs_fsdp2_on_a_cpu)])
def way(request):
    return request.param


@pytest.fixture(scope="module", params=[2, 4])
def found(request, way):
    return run_ranks(equal_steps, request.param, request.param, way, KINDS)


@pytest.fixture(scope="module")
def methods(way):
    return run_ranks(equal_steps, 2, 2, way, list(equal_runs.METHODS))[0]


@pytest.mark.parametrize("kind", equal_runs.METHODS)
def test_every_method_equals_one_process(methods, kind):
    equal_runs.assert_equal(methods[kind], kind)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_equal_one_process(found, kind):
    weights, masks, _ = found[0][kind]
    equal_runs.assert_equal(found[0][kind], kind)
    kept, total = (sum(int(f(mask)) for mask in masks.values()) for f in (lambda m: m.sum(), lambda m: m.numel()))
    for other in found:
        assert cases.same_bits(other[kind][0].values(), weights.values())
        assert other[kind][2] == 1 - kept / total
