"""A step on an accelerator, tested without one: the host reads no value, and there are few kernel launches."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from benchmarks.dispatch import LaunchCounter
from torch import nn

import sparsesam
from sparsesam.masks.patterns import as_pattern
from tests import cases, oracles

META = torch.device("meta")


def network(layers, device=META):
    blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(4 * 36, 3)).to(device)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)


def entries(share):
    def masks(model):
        generator = torch.Generator().manual_seed(0)
        return {name: torch.rand(p.shape, generator=generator) < share for name, p in model.named_parameters()}

    return masks


def two_of_four(model):
    like = {name: torch.rand(p.shape) for name, p in model.named_parameters()}
    return as_pattern("2:4").select(like)


def sam(masks=None, kind=sparsesam.SAM, rho=0.1, **options):
    def make(model):
        mask = {} if masks is None else {"mask": sparsesam.fixed_mask(masks(model))}
        return kind(sgd(model), model, rho, **mask, **options)

    return make


extrapolated = partial(sam, kind=sparsesam.ExtrapolatedSAM, rho=0.01)


def with_rho_on_device(model):
    opt = sam(rho_schedule=sparsesam.Warmup(4))(model)
    opt.param_groups[0]["rho"] = torch.full((), 0.1, device=META)
    return opt


OPTIMIZERS = {
    "SAM": sam(),
    "SAM, rho on the device": with_rho_on_device,
    "ASAM": sam(adaptive=True),
    "few entries": sam(entries(0.3)),
    "few entries, masked norm": sam(entries(0.3), norm="masked"),
    "most entries": sam(entries(0.7)),
    "rows": sam(cases.every_other_filter),
    "rows, masked norm": sam(cases.every_other_filter, norm="masked"),
    "2:4": sam(two_of_four),
    "last layers": sam(mask=sparsesam.fixed_mask("[2-9].*"), norm="masked"),
    "extrapolated": extrapolated(),
    "extrapolated, few entries": extrapolated(entries(0.3)),
    "extrapolated, rows": extrapolated(cases.every_other_filter),
}


def batch(device=META):
    return torch.empty(8, 4, 6, 6, device=device), torch.empty(8, dtype=torch.long, device=device)


@pytest.mark.parametrize("step", [cases.by_minimize, cases.in_two_phases])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_step_runs_on_meta_device(name, step):
    """There is no value to read there, and CPU tensors cannot be combined with meta tensors."""
    model = network(3)
    opt = OPTIMIZERS[name](model)
    for _ in range(3):
        step(opt, model, *batch())
    assert opt.steps == 3
    assert opt.savings().reused > 0 or name != "last layers"
    assert all(p.is_meta for p in model.parameters())


def launches_beyond_two_passes(name, layers):
    """Per step, without those of the base optimizer."""
    model = network(layers)
    opt = OPTIMIZERS[name](model)
    closure = cases.closure_for(model, opt, *batch(), backward=opt.backward)
    opt.step(closure)
    with LaunchCounter() as step:
        opt.step(closure)
    with LaunchCounter() as one_pass:
        closure()
    with LaunchCounter() as update:
        opt.base.step()
    return step.count - 2 * one_pass.count - update.count, len(list(model.parameters()))


@pytest.mark.parametrize(
    ("name", "limit", "slack"),
    [
        ("SAM", 55, 0),
        ("SAM, rho on the device", 55, 0),
        ("ASAM", 55, 0),
        # By chance a mask of four entries keeps none, or all of them.
        *[(name, 75, 4) for name in ("few entries", "few entries, masked norm", "most entries", "rows", "2:4")],
    ],
)
def test_launches_do_not_grow_with_number_of_tensors(name, limit, slack):
    few, _ = launches_beyond_two_passes(name, 3)
    many, _ = launches_beyond_two_passes(name, 12)
    assert abs(many - few) <= slack
    assert many < limit


def test_backward_of_some_filters_adds_at_most_five_launches_per_tensor():
    few, small = launches_beyond_two_passes("rows, masked norm", 3)
    many, large = launches_beyond_two_passes("rows, masked norm", 12)
    assert many - few <= 5 * (large - small)


def held_storages():
    """Of all tensors on the meta device, by address."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.is_meta]
    return {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors}


def held_bytes(older):
    return sum(storage.nbytes() for address, storage in held_storages().items() if address not in older)


@pytest.mark.parametrize(("share", "limit"), [(0.1, 1), (0.3, 2.6), (0.5, 2.3), (0.7, 3.1), (0.9, 4), (1.0, 4)])
@pytest.mark.parametrize("pattern", ["unstructured", "filter"])
def test_mask_takes_at_most_four_bytes_per_weight_with_what_it_saves(pattern, share, limit):
    """Beyond weights, gradients and the base optimizer, in the second pass and after the step."""
    older = held_storages()  # of other tests
    model = nn.Sequential(nn.Linear(200, 500, bias=False), nn.Linear(500, 300, bias=False)).to(META)
    weights = sum(p.numel() for p in model.parameters())
    like = {name: torch.empty(p.shape) for name, p in model.named_parameters()}
    masks = as_pattern(pattern).draw(like, torch.Generator().manual_seed(0), 1 - share)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = sparsesam.SSAM(base, model, rho=0.1, mask=sparsesam.fixed_mask(masks), norm="masked", engine=False)
    del masks, like
    x, beyond = torch.empty(1, 200, device=META), []
    for step in range(2):
        opt.zero_grad()
        model(x).sum().backward()
        with opt.perturbed():
            if step == 1:
                beyond.append(held_bytes(older) - 4 * weights)
            model(x).sum().backward()
        opt.step()
    opt.zero_grad()
    beyond.append(held_bytes(older) - 4 * weights)
    assert max(beyond) / weights <= limit + 0.01
    if share < 1:
        assert max(beyond) / weights > 4 * share  # what is saved is counted


def test_rho_tensor_follows_schedule_in_place():
    model, opt = cases.made(sparsesam.SAM, rho=0.1, rho_schedule=sparsesam.Warmup(4))
    rho = opt.param_groups[0]["rho"] = torch.tensor(0.4, dtype=torch.float64)
    e = cases.perturbation_of(opt, model, *cases.vectors())
    assert opt.param_groups[0]["rho"] is rho
    assert rho.item() == pytest.approx(0.1)
    assert oracles.flat(e).norm().item() == pytest.approx(0.1)
