"""Bad input raises an error that names argument, value and remedy, and changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from tests import cases


def sam(kind=sparsesam.SAM, **options):
    return cases.made(kind, **options)[1]


def budget(**options):
    model = cases.mlp(torch.float32)
    mask = sparsesam.budget_mask(model, torch.randn(8, 6), budget=1.9)
    return sparsesam.SSAM(cases.sgd(model), model, mask=mask, **options)


# ---- values ------------------------------------------------------------------------------------------------------

FIXED = sparsesam.fixed_mask("0.*")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *[({"rho": rho}, f"rho must be a finite number of at least 0, got {rho}; 0 is") for rho in (-0.1, math.nan)],
        *[({"rho": rho}, f"rho must be .* got {rho}") for rho in (math.inf, "big")],
        ({"adaptive": "some"}, 'adaptive must be False, True .*, "all" or "layer", got \'some\''),
        ({"eta": -1}, "eta must be a finite number of at least 0, got -1"),
        ({"every": 0}, "every must be an integer of at least 1, got 0"),
        ({"every": 1.5}, "every must be an integer"),
        ({"start": -1}, "start must be an integer of at least 0"),
        ({"ascent_fraction": 0}, r"ascent_fraction must be in \(0, 1\], got 0"),
        ({"ascent_fraction": "half"}, "ascent_fraction must be .* got half"),
        ({"ascent_steps": 0}, "ascent_steps must be an integer of at least 1, got 0"),
        ({"radius": "tensor"}, "radius must be one of 'global', 'layer', 'element', got 'tensor'"),
        ({"norm": "some"}, "norm must be one of 'full', 'masked', got 'some'"),
        ({"ascent": "extrapolation"}, "ascent must be one of 'explicit', .* got 'extrapolation'"),
        ({"ascent": "implicit-dense"}, "mask must be given with ascent='implicit-dense'"),
        ({"ascent": "implicit", "mask": FIXED}, 'norm must be "masked" with ascent="implicit"'),
        ({"ascent": "implicit-dense", "mask": FIXED, "engine": False}, "engine must be True with ascent="),
        ({"ascent_scope": "local"}, "model must be the DistributedDataParallel itself"),
        ({"kind": sparsesam.GSAM, "alpha": -1.0}, "alpha must be a finite number of at least 0, got -1.0"),
        ({"kind": sparsesam.GSAM, "alpha": math.inf}, "alpha must be a finite number of at least 0, got inf"),
        ({"kind": sparsesam.WSAM, "gamma": 1.0}, r"gamma must be in \[0, 1\), got 1.0"),
        ({"kind": sparsesam.LookSAM, "alpha": math.nan}, "alpha must be a finite number of at least 0, got nan"),
        ({"kind": sparsesam.FriendlySAM, "sigma": "1"}, "sigma must be a finite number of at least 0, got 1"),
        ({"kind": sparsesam.FriendlySAM, "decay": 1.5}, r"decay must be in \[0, 1\], got 1.5"),
        ({"kind": sparsesam.ZSharp, "quantile": 95}, r"quantile must be in \[0, 1\], got 95"),
        ({"kind": sparsesam.ESAM, "beta": 0.0}, r"beta must be in \(0, 1\], got 0.0"),
    ],
    ids=str,
)
def test_invalid_options_raise(options, words):
    with pytest.raises(ValueError, match=words):
        sam(**options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *[
            (lambda s=s: sparsesam.random_mask(sparsity=s), r"sparsity must be in \[0, 1\], got")
            for s in (-0.1, 1.2, math.nan, "half")
        ],
        (lambda: sparsesam.dynamic_mask(sparsity=1.2, refresh=None), r"sparsity must be in \[0, 1\], got"),
        (lambda: sparsesam.random_mask(), "sparsity must be given"),
        (lambda: sparsesam.random_mask(sparsity=0.3, pattern="2:4"), "0.5"),
        (lambda: sparsesam.random_mask(pattern="3:2"), "3"),
        (lambda: sparsesam.random_mask(sparsity=0.5, pattern="filters"), "filter"),
        (lambda: sparsesam.dynamic_mask(sparsity=0.5, drop="best", refresh=None), "'flattest', 'sharpest'"),
        (lambda: sparsesam.dynamic_mask(sparsity=0.5, drop_ratio=2, refresh=None), "drop_ratio"),
        (lambda: sparsesam.dynamic_mask(sparsity=0.5, total_steps=0, refresh=None), "total_steps"),
        (lambda: sparsesam.fisher_mask(cases.vectors(), sparsity=0.5), "loss_fn"),
        (lambda: sparsesam.fisher_mask(cases.vectors(), F.cross_entropy, sparsity=0.5, samples=0), "samples"),
        (lambda: sparsesam.random_mask(sparsity=0.5, refresh=0), "refresh must be an integer of at least 1, got 0"),
        (lambda: sparsesam.random_mask(sparsity=0.5, refresh=1.5), "refresh must be .* got 1.5; .* None"),
        (lambda: sparsesam.Mask(None, sparsity=0.5, keep="most"), "keep must be one of 'largest', 'smallest'"),
        (lambda: sparsesam.fisher_mask(loss_fn=F.cross_entropy, labels="all"), "labels must be one of"),
        (lambda: sparsesam.fixed_mask(), "fixed_mask"),
        (lambda: sparsesam.fixed_mask({"0.weight": torch.ones(2)}), "bool"),
        (lambda: sparsesam.Warmup(0), "steps"),
        (lambda: sparsesam.Warmup(1.5), "steps must be an integer"),
        (lambda: sparsesam.NM(0.5, 2), "n must be an integer"),
        (lambda: sparsesam.recommended(cases.sgd(cases.mlp()), cases.mlp(), cost="low"), "cost must be .* got low"),
        (lambda: budget(norm="full"), 'norm must be "masked" with BudgetMask, got "full"'),
        (lambda: sparsesam.SAM(cases.sgd(cases.mlp()), cases.mlp()), "6 of 6 are not in Sequential"),
    ],
)
def test_invalid_values_raise_with_reason(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: sparsesam.SAM(torch.optim.SGD, m), r"base must be a torch\.optim\.Optimizer"),
        (lambda m: sparsesam.SAM(m, m), r"base must be a torch\.optim\.Optimizer instance, got Sequential"),
        (lambda m: sparsesam.SAM(torch.optim.LBFGS(m.parameters()), m), "LBFGS"),
        (lambda m: sparsesam.SAM(sam(), m), "plain optimizer"),
        (lambda m: sparsesam.SAM(cases.sgd(m), "m"), r"model must be the torch\.nn\.Module .* got 'm'"),
        (lambda m: sparsesam.SAM(cases.sgd(m), m, engine="no"), "engine must be True or False, got 'no'"),
        (lambda m: sparsesam.SAM(cases.sgd(m), m, rho_schedule=0.5), "rho_schedule must be .* got 0.5"),
        (lambda m: sparsesam.SSAM(cases.sgd(m), m, mask=0.5), "mask must be a mask rule"),
        (lambda m: sparsesam.ExtrapolatedSAM(cases.sgd(m), m, mask=0.5), "mask must be a mask rule"),
        (lambda m: sparsesam.Mask(sparsesam.GradientMagnitude(), "2:4"), "pattern must be a Pattern, .* got '2:4'"),
        (lambda m: sparsesam.Mask(0.5, sparsity=0.5), "score must be a Score"),
        (lambda m: sparsesam.PerLayer("filter"), "inner must be a Pattern"),
        (lambda m: sparsesam.fixed_mask(["0.weight"]), r"masks must be .* got \['0.weight'\]"),
        *[(lambda m, loss=loss: sam().minimize(loss), "loss must be a function") for loss in (3, [], [None])],
    ],
)
def test_arguments_of_wrong_type_raise(call, words):
    with pytest.raises(TypeError, match=words):
        call(cases.mlp())


def test_invalid_rho_set_later_raises_before_perturbation():
    model = cases.mlp()
    opt = sparsesam.SAM(torch.optim.Adadelta(model.parameters()), model, rho=0.1)
    opt.param_groups[0]["sam_rho"] = -1
    before = cases.weights_of(model)
    with pytest.raises(ValueError, match="sam_rho must be"):
        cases.train(model, opt, range(1))
    assert cases.same_bits(before, cases.weights_of(model))


def test_foreign_parameter_group_raises_and_is_removed():
    opt = sam()
    with pytest.raises(ValueError, match="not in Sequential"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(opt.param_groups) == 1


# ---- calls in the wrong order ------------------------------------------------------------------------------------


def in_perturbed(act):
    def misuse(opt, model, x, y):
        F.cross_entropy(model(x), y).backward()
        with opt.perturbed():
            act(opt)

    return misuse


def after_perturbed(act):
    def misuse(opt, model, x, y):
        cases.both_passes(opt, model, x, y)
        act(opt, model, x, y)

    return misuse


def not_called(batch):
    raise AssertionError


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda opt, *_: opt.step(), r"step\(\) needs a gradient at w \+ e"),
        (in_perturbed(lambda opt: opt.step()), r"step\(\) inside perturbed"),
        (in_perturbed(lambda opt: opt.perturbed().__enter__()), "entered twice"),
        (in_perturbed(lambda opt: opt.load_state_dict(opt.state_dict())), r"load_state_dict\(\) inside a pass"),
        (after_perturbed(cases.with_closure), r"step\(closure\) after perturbed\(\): .* already exists"),
        (after_perturbed(lambda opt, *_: opt.minimize(not_called, batch=0)), "already exists"),
        (after_perturbed(lambda opt, *_: opt.step(not_called, batch=0)), "already exists"),
        (lambda opt, *_: opt.refresh_mask(), r"refresh_mask\(\) needs a mask"),
    ],
)
def test_calls_in_the_wrong_order_raise(misuse, words):
    model = cases.mlp()
    opt, before = sparsesam.SAM(cases.sgd(model), model), cases.weights_of(model)
    with pytest.raises(RuntimeError, match=words):
        misuse(opt, model, *cases.vectors())
    assert cases.same_bits(before, cases.weights_of(model))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (cases.with_closure, "batch must be given with ascent_fraction=0.25"),
        (cases.both_passes, r"ascent_fraction=0\.25 needs opt\.step"),
    ],
)
def test_ascent_fraction_needs_closure_and_batch(call, words):
    model, opt = cases.made(sparsesam.SAM, ascent_fraction=0.25)
    with pytest.raises(ValueError, match=words):
        call(opt, model, *cases.vectors())


# ---- masks -------------------------------------------------------------------------------------------------------


def bad_fisher():
    x, y = cases.vectors()
    return sparsesam.fisher_mask((x * torch.nan, y), F.cross_entropy, sparsity=0.5, samples=16)


class Scores:
    """Changes the scores |w|."""

    needs_gradient = False

    def __init__(self, change):
        self.change = change

    def __call__(self, context):
        return self.change(sparsesam.WeightMagnitude()(context))


def made_by(change):
    return lambda: sparsesam.Mask(Scores(change), sparsity=0.5)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (made_by(lambda scores: scores | {"5.weight": torch.ones(2)}), "score has '5.weight', .* not a parameter"),
        (
            made_by(lambda scores: {n: s.sum(0) for n, s in scores.items()}),
            r"score\['0.weight'\] must have .* \(8, 6\)",
        ),
        (made_by(lambda scores: {"0.weight": scores["0.weight"]}), "score must have every .* lacks '0.bias'"),
        (lambda: sparsesam.fixed_mask({"4.weigth": torch.ones(3, 5, dtype=torch.bool)}), r"'4.weigth'.*4.weight"),
        (lambda: sparsesam.fixed_mask({"4.weight": torch.ones(2, dtype=torch.bool)}), r"shape \(3, 5\), got \(2,\)"),
        (lambda: sparsesam.fixed_mask("layer9.*"), "matches no parameter to perturb"),
        (lambda: sparsesam.fixed_mask(types=sparsesam.NORMALIZATION), "no such layer"),
        (lambda: sparsesam.fisher_mask(None, F.cross_entropy, sparsity=0.5), "batch must be given"),
        (bad_fisher, r"0\.weight"),
    ],
)
def test_mask_that_cannot_be_made_raises_in_the_first_step(mask, words):
    model, opt = cases.made(sparsesam.SSAM, mask=mask())
    with pytest.raises(ValueError, match=words):
        cases.with_closure(opt, model, *cases.vectors())


@pytest.mark.parametrize("rule", ["fisher", "dynamic"])
def test_mask_is_kept_and_counted_when_a_later_score_is_not_finite(rule):
    model, x, y = cases.mlp(), *cases.vectors()
    if rule == "fisher":
        mask = sparsesam.fisher_mask((x, y), F.cross_entropy, sparsity=0.5, samples=16, refresh=1)
    else:
        mask = sparsesam.dynamic_mask(sparsity=0.5, refresh=1)
    opt = sparsesam.SSAM(cases.sgd(model), model, mask=mask)
    cases.with_closure(opt, model, x, y)
    kept = opt.masks
    x[0] = torch.nan
    with pytest.warns(RuntimeWarning, match="skipped_refreshes"):
        cases.with_closure(opt, model, x, y)
    assert opt.skipped_refreshes == 1
    assert cases.same_bits(kept.values(), opt.masks.values())
