"""Code written for davda54/sam or pytorch-optimizer runs unchanged, to the same weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import sparsesam
from sparsesam import compat
from tests import cases

pytorch_optimizer = pytest.importorskip("pytorch_optimizer")


def two_steps(opt, model, x, y):
    F.cross_entropy(model(x), y).backward()
    opt.first_step(zero_grad=True)
    F.cross_entropy(model(x), y).backward()
    opt.second_step(zero_grad=True)


def one_step(opt, model, x, y):
    closure = cases.closure_for(model, opt, x, y)
    closure()
    opt.step(closure)


def pair(name="SAM", build=cases.mlp, **options):
    model = build()
    twin = copy.deepcopy(model)
    given = {"rho": 0.3, "lr": 0.1, "momentum": 0.9, **options}
    ours = getattr(compat, name)(model.parameters(), torch.optim.SGD, **given)
    return model, ours, twin, getattr(pytorch_optimizer, name)(twin.parameters(), torch.optim.SGD, **given)


def assert_same_weights(model, twin):
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(twin), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SAM", {}),
        ("SAM", {"adaptive": True}),
        ("FriendlySAM", {"sigma": 0.7, "lmbda": 0.6}),
        ("FriendlySAM", {"sigma": 0.7, "lmbda": 0.6, "adaptive": True}),
        ("LookSAM", {"k": 3, "build": lambda: torch.nn.Linear(6, 3, bias=False).double()}),  # theirs projects by tensor
    ],
)
@pytest.mark.parametrize("step", [two_steps, one_step])
def test_steps_equal_original(step, name, options):
    model, ours, twin, theirs = pair(name, **options)
    for seed in range(8):
        x, y = cases.vectors(seed=seed)
        step(ours, model, x, y)
        step(theirs, twin, x, y)
    assert_same_weights(model, twin)


def test_arguments_may_be_positional_as_in_original():
    model = cases.mlp()
    opt = compat.LookSAM(model.parameters(), torch.optim.SGD, 0.2, 3, 0.5, True, lr=0.1)
    assert (opt.param_groups[0]["rho"], opt.options.every, opt.alpha) == (0.2, 3, 0.5)
    assert opt.param_groups[0]["adaptive"] == "all"


def test_first_step_without_clearing_keeps_gradient_like_original():
    model, ours, twin, theirs = pair()
    x, y = cases.vectors()
    for opt, network in ((ours, model), (theirs, twin)):
        F.cross_entropy(network(x), y).backward()
        opt.first_step()
        F.cross_entropy(network(x), y).backward()
        opt.second_step()
    assert_same_weights(model, twin)


def test_davda54_checkpoint_loads_with_warning():
    model, ours, *_ = pair()
    state = ours.base.state_dict()
    for group in state["param_groups"]:
        group.update(rho=0.2, adaptive=True, lr=0.05)
    state["state"] = {i: {"old_p": p.detach().clone()} for i, p in enumerate(model.parameters())}
    with pytest.warns(UserWarning, match="momentum starts from zero"):
        ours.load_state_dict(state)
    assert (ours.param_groups[0]["lr"], ours.param_groups[0]["rho"]) == (0.05, 0.2)
    assert not ours.state
    two_steps(ours, model, *cases.vectors())


def test_parameter_groups_with_own_options():
    model = cases.mlp()
    groups = [{"params": model[0].parameters(), "rho": 0.5, "adaptive": True}, {"params": model[2:].parameters()}]
    opt = compat.SAM(groups, torch.optim.SGD, rho=0.1, lr=0.1)
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
    with pytest.raises(ValueError, match="use_gc must be False"):
        pair(use_gc=True)
    _, ours, *_ = pair()
    with pytest.raises(RuntimeError, match="needs a closure"):
        ours.step()
    with pytest.raises(RuntimeError, match=r"call loss\.backward\(\) before it"):
        ours.step(lambda: None)
    with pytest.raises(RuntimeError, match=r"needs a first_step\(\) before it"):
        ours.second_step()


@pytest.mark.parametrize("kind", [sparsesam.SAM, sparsesam.SSAM])
def test_original_call_on_our_optimizers_names_compat(kind):
    model = cases.mlp()
    for call in (
        lambda: kind(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1),
        lambda: kind(model.parameters(), base_optimizer=torch.optim.SGD),
        lambda: kind(torch.optim.SGD, model),
        lambda: kind(cases.sgd(model), model, lr=0.1),
    ):
        with pytest.raises(TypeError, match=r"sparsesam\.compat\.SAM"):
            call()


# ---- the rest of pytorch-optimizer's family ------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"decouple": False}, {"adaptive": True}, {"max_norm": 0.2}])
def test_wsam_equals_original(options):
    model = cases.mlp()
    twin = copy.deepcopy(model)
    given = {"rho": 0.3, "gamma": 0.8, "lr": 0.1, "momentum": 0.9, **options}
    ours = compat.WSAM(model, model.parameters(), torch.optim.SGD, **given)
    theirs = pytorch_optimizer.WSAM(twin, twin.parameters(), torch.optim.SGD, **given)
    for seed in range(6):
        x, y = cases.vectors(seed=seed)
        losses = [ours.step(cases.closure_for(model, ours, x, y)), theirs.step(cases.closure_for(twin, theirs, x, y))]
    assert_same_weights(model, twin)
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-7)


def gsam(package, **options):
    """A model with a GSAM of the package, and one step on the batch of a seed."""
    from pytorch_optimizer.lr_scheduler import ProportionScheduler

    model = cases.mlp()
    base = cases.sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(base, 2, 0.5)
    rho = ProportionScheduler(schedule, max_lr=0.1, min_lr=0.0, max_value=0.4, min_value=0.1)
    opt = package.GSAM(model.parameters(), base, model, rho, alpha=0.4, **options)

    def step(seed):
        opt.set_closure(F.cross_entropy, *cases.vectors(seed=seed))
        found = opt.step()
        schedule.step()
        opt.update_rho_t()
        return found

    return model, opt, step


@pytest.mark.parametrize("adaptive", [False, True])
def test_gsam_equals_original(adaptive):
    results = []
    for package in (compat, pytorch_optimizer):
        model, opt, step = gsam(package, adaptive=adaptive)
        outputs, loss = [step(seed) for seed in range(6)][-1]
        results.append([outputs, loss, torch.tensor(opt.rho_t), *cases.weights_of(model)])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


def test_gsam_continues_from_an_original_checkpoint():
    model, ours, our_step = gsam(compat, adaptive=True)
    twin, theirs, their_step = gsam(pytorch_optimizer, adaptive=True)
    their_step(0)
    model.load_state_dict(twin.state_dict())
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    our_step(1)
    theirs.set_closure(F.cross_entropy, *cases.vectors(seed=1))
    theirs.step()
    assert_same_weights(model, twin)


@pytest.mark.parametrize(("name", "options"), [("SAM", {}), ("FriendlySAM", {"sigma": 0.7, "lmbda": 0.6})])
def test_continues_from_an_original_checkpoint(name, options):
    model, ours, twin, theirs = pair(name, **options)
    for seed in range(3):
        two_steps(theirs, twin, *cases.vectors(seed=seed))
    model.load_state_dict(twin.state_dict())
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for seed in range(3, 6):
        two_steps(ours, model, *cases.vectors(seed=seed))
        two_steps(theirs, twin, *cases.vectors(seed=seed))
    assert_same_weights(model, twin)
