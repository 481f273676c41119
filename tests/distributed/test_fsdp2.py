"""fully_shard (FSDP2): each rank holds a part of every weight and takes the steps of one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sparsesam
from tests import cases
from tests.distributed import equal_runs
from tests.distributed.processes import run_ranks

pytestmark = [pytest.mark.xdist_group("ranks"), cases.needs_fsdp2_on_a_cpu]


def sharded(model, *ranks, **options):
    """Over one number of ranks, or replicated over the first of two."""
    mesh = init_device_mesh("cpu", ranks, mesh_dim_names=("replicate", "shard")[-len(ranks) :])
    for layer in (model[0], model[2], model[5], model):
        fully_shard(layer, mesh=mesh, **options)
    return model


def gradient_outside_the_optimizer(rank, clears):
    """Two phases; the first layer belongs to no optimizer of ours."""
    found = []
    for shards in (False, True):
        model = sharded(equal_runs.network(), 2) if shards else equal_runs.network()
        opt = sparsesam.SAM(torch.optim.SGD([*model.parameters()][2:], lr=0.1), model, rho=0.5)
        x, y = cases.images(16, torch.float64)
        for _ in range(2):
            opt.zero_grad()
            with opt.first_pass():
                if clears:
                    model[0].zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
            with opt.perturbed():
                torch.nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
        found.append(equal_runs.whole(model[0].weight.grad))
    return found


@pytest.mark.parametrize("clears", [True, False])
def test_gradient_outside_the_optimizer_is_that_of_the_second_pass(clears):
    for found, wanted in run_ranks(gradient_outside_the_optimizer, 2, clears):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def resumed_methods(rank):
    found = {}
    for kind in ("LookSAM", "FriendlySAM", "FriendlySAM of a mask"):
        runs = [sharded(equal_runs.network(), 2) for _ in range(2)]
        first, second = (equal_runs.optimizer(kind, model) for model in runs)
        equal_runs.train(runs[0], first, (rank, 2), range(5))
        runs[1].load_state_dict(runs[0].state_dict())
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for model, opt in zip(runs, (first, second), strict=True):
            equal_runs.train(model, opt, (rank, 2), range(5, 10))
        found[kind] = [[p.full_tensor().detach() for p in model.parameters()] for model in runs]
    return found


def test_methods_with_state_resume_from_shards():
    for kind, runs in run_ranks(resumed_methods, 2)[0].items():
        assert cases.same_bits(*runs), kind


def rows_of_the_first_rank(rank):
    found = []
    for implementation in ("host", "accelerator"):
        with cases.moved_as_on(implementation):
            model = sharded(equal_runs.network().float(), 2)
            masks = {name: torch.zeros(p.shape, dtype=torch.bool) for name, p in model.named_parameters()}
            masks["0.weight"][:1] = True
            mask = sparsesam.fixed_mask(masks)
            opt = sparsesam.SSAM(cases.sgd(model), model, rho=0.3, mask=mask, norm="masked")
            for _ in range(3):
                cases.with_closure(opt, model, *cases.images())
            found.append([p.full_tensor().detach() for p in model.parameters()])
    return found


def test_rank_that_keeps_no_weight_sends_what_the_others_send():
    for host, accelerator in run_ranks(rows_of_the_first_rank, 2):
        torch.testing.assert_close(host, accelerator)
