"""A torch optimizer around another: names and groups of parameters, hooks, schedulers, copies."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from tests import cases, oracles

# ---- parameter groups --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.Adadelta])
def test_options_per_parameter_group(base):
    """Adadelta has an option rho of its own."""
    rho = "sam_rho" if base is torch.optim.Adadelta else "rho"
    model = cases.mlp()
    groups = [
        {"params": model[0].parameters(), rho: 0.4},
        {"params": model[2].parameters(), "perturb": False},
        {"params": model[4].parameters()},
    ]
    opt = sparsesam.SAM(base(groups), model, rho=0.1)
    assert [group[rho] for group in opt.param_groups] == [0.4, 0.1, 0.1]
    assert base is torch.optim.SGD or [group["rho"] for group in opt.param_groups] == [0.9] * 3  # Adadelta's
    e = cases.perturbation_of(opt, model, *cases.vectors())
    gradients = cases.gradients_of(model, *cases.vectors())
    length = oracles.flat([*gradients[:2], *gradients[4:]]).norm()
    radii = [0.4, 0.4, 0.0, 0.0, 0.1, 0.1]
    expected = [r * g / length for r, g in zip(radii, gradients, strict=True)]
    torch.testing.assert_close(e, expected, rtol=1e-9, atol=1e-12)


def test_groups_may_differ_in_maximize():
    model = cases.mlp()
    groups = [{"params": model[0].parameters(), "maximize": True}, {"params": model[2:].parameters()}]
    opt = sparsesam.SAM(torch.optim.SGD(groups, lr=0.1), model, rho=0.1)
    gradients = cases.gradients_of(model, *cases.vectors())
    e = cases.perturbation_of(opt, model, *cases.vectors())
    signs = [bool((move * g).sum() > 0) for move, g in zip(e, gradients, strict=True)]
    assert signs == [False, False, True, True, True, True]


JOINS = {
    "added": lambda model, opt: opt.add_param_group({"params": model[0].parameters(), "lr": 0.01}),
    "added to the base": lambda model, opt: opt.base.add_param_group({"params": model[0].parameters(), "lr": 0.01}),
    "enabled": lambda model, opt: opt.param_groups[0].update(perturb=True),
    "unfrozen": lambda model, opt: model[0].requires_grad_(True),
}


@pytest.mark.parametrize("step", [cases.with_closure, cases.in_two_phases])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("join", JOINS)
def test_layer_that_joins_later_is_perturbed(join, masked, step):
    model = cases.mlp()
    model[0].requires_grad_(join != "unfrozen")
    groups = [{"params": list(model[2:].parameters())}]
    if "added" not in join:
        groups.insert(0, {"params": list(model[0].parameters()), "perturb": join == "unfrozen"})
    mask = {"mask": sparsesam.random_mask(sparsity=0.5)} if masked else {}
    opt = sparsesam.SAM(torch.optim.SGD(groups, lr=0.1), model, rho=0.5, **mask)
    step(opt, model, *cases.vectors())
    assert "0.weight" not in opt.masks
    JOINS[join](model, opt)
    seen = []
    model[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
    step(opt, model, *cases.vectors())
    assert not torch.equal(*seen)
    assert [group["rho"] for group in opt.param_groups] == [0.5] * len(opt.param_groups)
    assert opt.sparsity == pytest.approx(0.5 if masked else 0.0, abs=0.01)


def test_later_wrapper_around_same_base_has_its_own_options():
    model = cases.mlp()
    base = torch.optim.SGD([{"params": p} for p in model.parameters()], lr=0.1)
    base.param_groups[0]["rho"] = 0.7  # the user's
    halved = sparsesam.SAM(base, model, rho=0.3, adaptive=True, rho_schedule=lambda step: 0.5)
    cases.train(model, halved, range(1))
    assert [group["rho"] for group in halved.param_groups] == [0.35, *[0.15] * 5]
    opt = sparsesam.SAM(base, model, rho=0.1)
    assert [group["rho"] for group in opt.param_groups] == [0.7, *[0.1] * 5]
    assert not any(group["adaptive"] for group in opt.param_groups)


# ---- names -------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.embed(tokens).mean(1))


@pytest.mark.parametrize("mask", [None, sparsesam.fixed_mask("out.*"), sparsesam.fixed_mask(types=(nn.Linear,))])
def test_tied_weight_is_perturbed_once_and_found_by_each_of_its_names(mask):
    torch.manual_seed(0)
    model = Tied().double()
    twin = copy.deepcopy(model)
    opt, twin_base = sparsesam.SAM(cases.sgd(model), model, rho=0.2, mask=mask), cases.sgd(twin)
    tokens, y = torch.randint(0, 7, (8, 3)), torch.randint(0, 7, (8,))
    for _ in range(3):
        cases.with_closure(opt, model, tokens, y)
        oracles.ssam_step(twin, twin_base, lambda m: F.cross_entropy(m(tokens), y), rho=0.2)
    assert list(opt.masks) == ["embed.weight"]
    cases.assert_close(model, twin)


def test_compiled_model_keeps_its_names():
    model = cases.mlp()
    wrapped = torch.compile(model)
    opt = sparsesam.SAM(cases.sgd(wrapped), wrapped, rho=0.1)
    assert list(opt.masks) == [name for name, _ in model.named_parameters()]


def test_printed_optimizer_names_method_and_base():
    text = repr(cases.ssam(cases.mlp(), "4.*"))
    assert text.startswith("SSAM(rho=0.3, ")
    assert "SGD" in text
    assert "sparsesam" not in text


# ---- hooks and schedulers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [cases.by_minimize, cases.with_closure])
def test_step_hooks_of_wrapper_and_base_fire_once(step):
    model, opt = cases.made(sparsesam.SAM, rho=0.1)
    seen = []
    opt.register_step_pre_hook(lambda *_: seen.append("wrapper before"))
    opt.register_step_post_hook(lambda *_: seen.append("wrapper after"))
    opt.base.register_step_pre_hook(lambda *_: seen.append("base"))
    step(opt, model, *cases.vectors())
    assert seen == ["wrapper before", "base", "wrapper after"]


@pytest.mark.parametrize("step", [cases.by_minimize, cases.with_closure])
@pytest.mark.parametrize("on", ["wrapper", "base"])
@pytest.mark.filterwarnings("error")
def test_learning_rate_schedulers_on_wrapper_or_base(on, step):
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model, lr=1.0), model, rho=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(opt if on == "wrapper" else opt.base, step_size=1, gamma=0.5)
    for expected in (1.0, 0.5, 0.25):
        assert opt.param_groups[0]["lr"] == opt.base.param_groups[0]["lr"] == expected
        step(opt, model, *cases.vectors())
        scheduler.step()


def test_one_cycle_drives_momentum_through_wrapper():
    _, opt = cases.made(sparsesam.SAM, rho=0.1)
    torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=10)
    assert opt.base.param_groups[0]["momentum"] == 0.95


# ---- copies ------------------------------------------------------------------------------------------------------


def test_state_dict_and_copies_in_a_pass():
    """The model's state dict warns; a copy of the model is a plain model; the optimizer is not copied."""
    model, opt = cases.made(sparsesam.SAM, rho=0.1)
    F.cross_entropy(model(cases.vectors()[0]), cases.vectors()[1]).backward()
    with opt.perturbed():
        with pytest.warns(RuntimeWarning, match="holds the perturbed weights"):
            model.state_dict()
        with pytest.raises(RuntimeError, match="copied inside"):
            copy.deepcopy(opt)
        copied, pickled = copy.deepcopy(model), pickle.dumps(model)
    assert b"sparsesam" not in pickled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for plain in (model, copied, pickle.loads(pickled)):
            plain.state_dict()
