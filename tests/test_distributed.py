"""Two ranks: the same masks on both, and the weights that one rank reaches with the whole batch."""

from __future__ import annotations

import os

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import sparsesam
from tests import cases


def rules(rank=0):
    return {
        "sam": None,
        "fisher": sparsesam.fisher_mask(
            cases.images(32, torch.float64),
            F.cross_entropy,
            sparsity=0.5,
            samples=16,
            refresh=sparsesam.every_steps(2),
        ),
        "dynamic": sparsesam.dynamic_mask(sparsity=0.5, refresh=sparsesam.every_steps(2), total_steps=6),
        # Ranks that disagree, as they would with differently sharded data or seeds: rank 0 decides.
        "random": sparsesam.random_mask(sparsity=0.5, refresh=sparsesam.every_steps(2), seed=rank),
    }


def no_norm(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 3)
    ).double()


def train(model, rule, batches):
    base = cases.sgd(model)
    opt = sparsesam.SAM(base, model, rho=0.1) if rule is None else sparsesam.SSAM(base, model, rho=0.1, mask=rule)
    for x, y in batches:
        opt.step(cases.closure_for(model, opt, x, y))
    return opt


def worker(rank, folder, kind):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = DistributedDataParallel(no_norm())
    halves = [tuple(t.chunk(2)[rank] for t in cases.images(16, torch.float64, seed=s)) for s in range(5)]
    opt = train(model, rules(rank)[kind], halves)
    torch.save({"weights": model.module.state_dict(), "masks": opt.masks}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", list(rules()))
def test_two_ranks_equal_one(kind, tmp_path):
    mp.spawn(worker, (str(tmp_path), kind), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert cases.same_bits(first["weights"].values(), second["weights"].values())
    assert all(torch.equal(first["masks"][name], mask) for name, mask in second["masks"].items())
    model = no_norm()
    opt = train(model, rules()[kind], [cases.images(16, torch.float64, seed=s) for s in range(5)])
    torch.testing.assert_close(dict(model.state_dict()), dict(first["weights"]), rtol=1e-9, atol=1e-11)
    assert all(torch.equal(first["masks"][name], mask) for name, mask in opt.masks.items())


def late_worker(rank, folder):
    """As trainers do: the optimizer is made first, the model wrapped afterwards."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = no_norm()
    opt = sparsesam.SSAM(cases.sgd(model), model, rho=0.1, norm="masked", mask=sparsesam.fixed_mask("3.*"))
    wrapped = DistributedDataParallel(model)
    for seed in range(4):
        x, y = (t.chunk(2)[rank] for t in cases.images(16, torch.float64, seed=seed))
        opt.step(cases.closure_for(wrapped, opt, x, y))
    torch.save((model.state_dict(), opt.engine_report()), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_a_model_that_is_wrapped_after_the_optimizer_was_made(tmp_path):
    mp.spawn(late_worker, (str(tmp_path),), nprocs=2)
    weights, report = torch.load(tmp_path / "0.pt", weights_only=True)
    model = no_norm()
    opt = sparsesam.SSAM(cases.sgd(model), model, rho=0.1, norm="masked", mask=sparsesam.fixed_mask("3.*"))
    for seed in range(4):
        opt.step(cases.closure_for(model, opt, *cases.images(16, torch.float64, seed=seed)))
    torch.testing.assert_close(dict(model.state_dict()), dict(weights), rtol=1e-9, atol=1e-11)
    assert report["engine"] == "on"
    assert "used again" in report["0.weight"]


def sharded_worker(rank, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = cases.mlp()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer, mesh=mesh)
    groups = [{"params": model[0].parameters(), "perturb": False}, {"params": model[2:].parameters()}]
    opt = sparsesam.SAM(torch.optim.SGD(groups, lr=0.1, momentum=0.9), model, rho=0.3)
    for seed in range(4):
        x, y = (t.chunk(2)[rank] for t in cases.vectors(seed=seed))
        before = [p.to_local().clone() for p in model.parameters()]
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with opt.perturbed():
            F.cross_entropy(model(x), y).backward()
        assert cases.same_bits(before, [p.to_local() for p in model.parameters()])
        opt.step()
    whole = [p.full_tensor() for p in model.parameters()]
    masked = sparsesam.SSAM(cases.sgd(model), model, mask=sparsesam.random_mask(sparsity=0.5))
    with pytest.raises(ValueError, match="sharded parameters"):
        masked.step(cases.closure_for(model, masked, x, y))
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")
    dist.destroy_process_group()


def test_sharded_parameters_equal_whole_ones(tmp_path):
    mp.spawn(sharded_worker, (str(tmp_path),), nprocs=2)
    model = cases.mlp()
    groups = [{"params": model[0].parameters(), "perturb": False}, {"params": model[2:].parameters()}]
    opt = sparsesam.SAM(torch.optim.SGD(groups, lr=0.1, momentum=0.9), model, rho=0.3)
    for seed in range(4):
        opt.step(cases.closure_for(model, opt, *cases.vectors(seed=seed)))
    torch.testing.assert_close(cases.weights_of(model), torch.load(tmp_path / "whole.pt"), rtol=1e-9, atol=1e-11)
