"""Code written for davda54/sam runs unchanged, to the same weights; other methods train like pytorch-optimizer's."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import sparsesam
from sparsesam import compat
from tests import cases

pytorch_optimizer = pytest.importorskip("pytorch_optimizer")


def two_steps(opt, model, x, y, zero_grad=True):
    F.cross_entropy(model(x), y).backward()
    opt.first_step(zero_grad=zero_grad)
    F.cross_entropy(model(x), y).backward()
    opt.second_step(zero_grad=True)


def two_steps_without_clearing(opt, model, x, y):
    two_steps(opt, model, x, y, zero_grad=False)


def one_step(opt, model, x, y):
    closure = cases.closure_for(model, opt, x, y)
    closure()
    opt.step(closure)


def original(name, model, **options):
    """pytorch-optimizer's method; WSAM takes the model first."""
    first = (model,) if name == "WSAM" else ()
    given = {"rho": 0.3, "lr": 0.1, "momentum": 0.9, **options}
    return getattr(pytorch_optimizer, name)(*first, model.parameters(), torch.optim.SGD, **given)


def pair(**options):
    model = cases.mlp()
    twin = copy.deepcopy(model)
    ours = compat.SAM(model.parameters(), torch.optim.SGD, rho=0.3, lr=0.1, momentum=0.9, **options)
    return model, ours, twin, original("SAM", twin, **options)


def assert_same_weights(model, twin):
    cases.assert_close(model, twin, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("step", [two_steps, two_steps_without_clearing, one_step])
def test_steps_equal_original(step, adaptive):
    model, ours, twin, theirs = pair(adaptive=adaptive)
    for seed in range(8):
        batch = cases.vectors(seed=seed)
        step(ours, model, *batch)
        step(theirs, twin, *batch)
    assert_same_weights(model, twin)


def test_parameter_groups_with_own_options():
    model = cases.mlp()
    groups = [{"params": model[0].parameters(), "rho": 0.5, "adaptive": True}, {"params": model[2:].parameters()}]
    opt = compat.SAM(groups, torch.optim.SGD, 0.1, lr=0.1)
    assert [(group["rho"], group["adaptive"]) for group in opt.param_groups] == [(0.5, "all"), (0.1, False)]


def test_statistics_update_once_per_step_with_model():
    model = cases.convnet()
    twin = copy.deepcopy(model)
    opt = compat.SAM(model.parameters(), torch.optim.SGD, rho=0.5, lr=0.0, model=model)
    x, y = cases.images()
    two_steps(opt, model, x, y)
    twin(x)
    assert cases.same_bits(list(model.buffers()), list(twin.buffers()))


def test_misuse_raises_with_explanation():
    _, ours, _, theirs = pair()
    for call, words in (
        (ours.step, "needs a closure"),
        (lambda: ours.step(lambda: None), r"call loss\.backward\(\) before it"),
        (ours.second_step, r"needs a first_step\(\) before it"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()
    with pytest.raises(ValueError, match="checkpoint must be one of sparsesam"):
        ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("kind", [sparsesam.SAM, sparsesam.SSAM])
def test_original_call_on_our_optimizers_names_compat(kind):
    model = cases.mlp()
    for call in (
        lambda: kind(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1),
        lambda: kind(model.parameters(), base_optimizer=torch.optim.SGD),
        lambda: kind(cases.sgd(model), model, lr=0.1),
        lambda: sparsesam.SAM(torch.optim.SGD, model),
    ):
        with pytest.raises(TypeError, match=r"sparsesam\.compat\.SAM"):
            call()


# ---- pytorch-optimizer's other methods ---------------------------------------------------------------------------


def one_tensor():
    """For LookSAM, whose original projects tensor by tensor."""
    torch.manual_seed(0)
    return torch.nn.Linear(6, 3, bias=False).double()


def gsam(model, **options):
    from pytorch_optimizer.lr_scheduler import ProportionScheduler

    base = cases.sgd(model)
    constant = torch.optim.lr_scheduler.StepLR(base, 100)
    schedule = ProportionScheduler(constant, max_lr=0.1, min_lr=0.0, max_value=0.3, min_value=0.3)
    return pytorch_optimizer.GSAM(model.parameters(), base, model, schedule, **options)


def gsam_step(opt, model, x, y):
    opt.set_closure(F.cross_entropy, x, y)
    opt.step()


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(
    ("name", "options", "their_options", "step"),
    [
        ("GSAM", {"alpha": 0.4}, {"alpha": 0.4}, gsam_step),
        ("WSAM", {"gamma": 0.8}, {"gamma": 0.8}, cases.with_closure),
        ("WSAM", {"gamma": 0.8, "decouple": False}, {"gamma": 0.8, "decouple": False}, cases.with_closure),
        ("LookSAM", {"every": 3}, {"k": 3}, two_steps),
        ("FriendlySAM", {"sigma": 0.7, "decay": 0.6}, {"sigma": 0.7, "lmbda": 0.6}, two_steps),
    ],
)
def test_methods_equal_those_of_pytorch_optimizer(name, options, their_options, step, adaptive):
    model = one_tensor() if name == "LookSAM" else cases.mlp()
    twin = copy.deepcopy(model)
    scales = {"adaptive": "all" if adaptive else False, "eta": 0.0}
    ours = getattr(sparsesam, name)(cases.sgd(model), model, 0.3, **scales, **options)
    make = gsam if name == "GSAM" else partial(original, name)
    theirs = make(twin, adaptive=adaptive, **their_options)
    for seed in range(6):
        batch = cases.vectors(seed=seed)
        cases.with_closure(ours, model, *batch)
        step(theirs, twin, *batch)
    assert_same_weights(model, twin)
