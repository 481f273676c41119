"""Save, resume, compare: a resumed run equals the uninterrupted one bit for bit.

The methods of the family have the same test in `test_variants.py`; `torture/` kills runs.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from tests import cases

RULES = {
    "all": lambda: None,
    "fisher": lambda: sparsesam.fisher_mask(cases.images(64), F.cross_entropy, sparsity=0.5, samples=16, refresh=3),
    "dynamic": lambda: sparsesam.dynamic_mask(sparsity=0.5, refresh=2, total_steps=12),
    "dynamic 2:4": lambda: sparsesam.dynamic_mask(pattern="2:4", refresh=2),
    "random": lambda: sparsesam.random_mask(sparsity=0.9, refresh=2),
    "filters": lambda: sparsesam.random_mask(sparsity=0.5, pattern="filter"),
    "fixed": lambda: sparsesam.fixed_mask("0.*"),
}


def make(rule, model, base=torch.optim.SGD):
    base = base(model.parameters(), **{"lr": 0.1, "momentum": 0.9} if base is torch.optim.SGD else {})
    return sparsesam.SAM(base, model, rho=0.1, mask=RULES[rule](), rho_schedule=sparsesam.InverseSqrt())


def run(model, opt, seeds):
    cases.train(model, opt, seeds, batch=cases.images)


@pytest.mark.parametrize(
    ("rule", "base"),
    [*((rule, torch.optim.SGD) for rule in RULES), ("dynamic", torch.optim.AdamW), ("fisher", torch.optim.Adadelta)],
)
def test_resumed_run_equals_uninterrupted(rule, base):
    cases.assert_resumes(lambda model: make(rule, model, base), build=cases.convnet, batch=cases.images, at=5, end=12)


class Scaled(nn.Module):
    """Its scale has no dimension."""

    def __init__(self, seed=0):
        super().__init__()
        self.layers, self.scale = cases.mlp(seed=seed), nn.Parameter(torch.tensor(1.5 + seed, dtype=torch.float64))

    def forward(self, x):
        return self.scale * self.layers(x)


@pytest.mark.parametrize("implementation", ["host", "device"])
@pytest.mark.parametrize("pattern", ["unstructured", "filter"])
def test_resumed_run_continues_with_kept_tensors(pattern, implementation):
    def make(model):
        mask = sparsesam.random_mask(sparsity=0.5, pattern=pattern)
        return sparsesam.FriendlySAM(cases.sgd(model), model, mask=mask, norm="masked")

    with cases.moved_as_on(implementation):
        cases.assert_resumes(make, build=Scaled, at=1)


@pytest.mark.parametrize("is_added", [True, False])
@pytest.mark.parametrize("is_just_refreshed", [True, False])
def test_parameters_added_or_frozen_before_a_checkpoint_get_a_mask_after_it(is_added, is_just_refreshed):
    def made():
        model = cases.convnet()
        base = torch.optim.SGD((model[:4] if is_added else model).parameters(), lr=0.1)
        return model, sparsesam.SSAM(base, model, mask=sparsesam.random_mask(sparsity=0.5))

    def change(model, opt):
        if is_added:
            opt.add_param_group({"params": list(model[4].parameters())})
        else:
            model[0].weight.requires_grad_(False)

    (model, opt), (again, resumed) = made(), made()
    run(model, opt, range(2))
    if is_just_refreshed:
        opt.refresh_mask(now=True)
    change(model, opt)
    change(again, resumed)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    run(model, opt, range(2, 4))
    run(again, resumed, range(2, 4))
    assert cases.same_state(model, again)
    cases.assert_same_masks(opt, resumed)


# ---- other checkpoints -------------------------------------------------------------------------------------------


def test_checkpoint_of_the_base_is_loaded_with_a_warning_and_resets_our_state():
    model = cases.convnet()
    base = cases.sgd(model)
    run(model, base, range(1))
    opt = make("random", model)
    run(model, opt, range(3))
    assert opt.param_groups[0]["rho"] < 0.1
    with pytest.warns(UserWarning, match=r"bare base optimizer.* masks are reset"):
        opt.load_state_dict(base.state_dict())
    assert (opt.steps, opt.masks, opt.param_groups[0]["rho"]) == (0, {}, 0.1)
    loaded, saved = (next(iter(one.state.values()))["momentum_buffer"] for one in (opt, base))
    assert torch.equal(loaded, saved)


def test_mismatched_checkpoint_changes_nothing():
    model = cases.convnet()
    opt = make("dynamic", model)
    run(model, opt, range(2))
    before = copy.deepcopy(opt.masks)
    for match in (r"0\.weight", "version"):
        saved = opt.state_dict()
        if match == "version":
            saved["param_groups"][0]["sparsesam"]["version"] = 99
        else:
            saved["state"][0]["sparsesam_mask"] = torch.ones(1, 2, dtype=torch.bool)
        with pytest.raises(ValueError, match=match):
            opt.load_state_dict(saved)
    assert cases.same_bits(before.values(), opt.masks.values())


@pytest.mark.parametrize(
    "kinds", [(sparsesam.SAM, sparsesam.ExtrapolatedSAM), (sparsesam.ExtrapolatedSAM, sparsesam.SAM)]
)
def test_another_method_continues_from_a_checkpoint(kinds):
    model = cases.mlp()
    opt, other = (kind(cases.sgd(model), model, rho) for kind, rho in zip(kinds, (0.02, 0.05), strict=True))
    cases.train(model, opt, range(2))
    other.load_state_dict(opt.state_dict())
    assert (other.steps, other.param_groups[0]["rho"]) == (2, 0.02)
    cases.train(model, other, range(2, 4))
    assert other.steps == 4


@pytest.mark.filterwarnings("error")
def test_hooks_are_called_and_may_replace_the_state():
    model = cases.convnet()
    opt = make("all", model)
    seen = []
    opt.register_state_dict_pre_hook(lambda o: seen.append("before save"))
    opt.register_state_dict_post_hook(lambda o, state: {"replaced": state})
    opt.register_load_state_dict_pre_hook(lambda o, state: state["replaced"])
    opt.register_load_state_dict_post_hook(lambda o: seen.append("after load"))
    run(model, opt, range(1))
    opt.load_state_dict(opt.state_dict())
    assert seen == ["before save", "after load"]
    assert opt.steps == 1


def test_checkpoint_without_perturbed_parameters_loads():
    model, opt = cases.made(sparsesam.ExtrapolatedSAM)
    opt.param_groups[0]["perturb"] = False
    cases.train(model, opt, range(1))
    opt.load_state_dict(opt.state_dict())
    assert opt.steps == 1
