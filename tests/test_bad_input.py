"""Bad input raises an error that names argument, value and remedy, and changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from tests import cases


def sam(**options):
    model = cases.mlp()
    return sparsesam.SAM(cases.sgd(model), model, **options)


@pytest.mark.parametrize("rho", [-0.1, float("nan"), float("inf"), "big"])
def test_rho(rho):
    with pytest.raises(ValueError, match=f"rho must be .* got {rho}"):
        sam(rho=rho)


def test_invalid_rho_set_later_raises_before_perturbation():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.1)
    opt.param_groups[0]["rho"] = -1
    before = cases.weights_of(model)
    with pytest.raises(ValueError, match="rho must be"):
        opt.step(cases.closure_for(model, opt, *cases.vectors()))
    assert cases.same_bits(before, cases.weights_of(model))


@pytest.mark.parametrize("sparsity", [-0.1, 1.2, float("nan"), "half"])
@pytest.mark.parametrize("make", [sparsesam.random_mask, lambda **k: sparsesam.dynamic_mask(refresh=None, **k)])
def test_sparsity(make, sparsity):
    with pytest.raises(ValueError, match=r"sparsity must be in \[0, 1\], got"):
        make(sparsity=sparsity)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sam(adaptive="some"), "adaptive must be"),
        (lambda: sam(eta=-1), "eta must be"),
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
        (lambda: sparsesam.Cosine(5, final=-1), "final"),
        (lambda: sparsesam.NM(0.5, 2), "n must be an integer"),
        (lambda: sam(ascent_fraction="half"), "ascent_fraction must be .* got half"),
        (lambda: sam(ascent="implicit-dense"), "mask must be given with ascent='implicit-dense'"),
        (lambda: sam(ascent="extrapolation"), "ascent must be one of 'explicit', .* got 'extrapolation'"),
        (lambda: sparsesam.recommended(cases.sgd(cases.mlp()), cases.mlp(), cost="low"), "cost must be .* got low"),
    ],
)
def test_invalid_values_raise_with_reason(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_arguments_of_wrong_type():
    model = cases.mlp()
    with pytest.raises(TypeError, match=r"base must be a torch\.optim\.Optimizer"):
        sparsesam.SAM(torch.optim.SGD, model)
    with pytest.raises(TypeError, match="LBFGS"):
        sparsesam.SAM(torch.optim.LBFGS(model.parameters()), model)
    with pytest.raises(TypeError, match="plain optimizer"):
        sparsesam.SAM(sam(), model)
    with pytest.raises(TypeError, match="engine must be True or False, got 'no'"):
        sparsesam.SAM(cases.sgd(model), model, engine="no")
    with pytest.raises(TypeError, match="mask must be a mask rule"):
        sparsesam.SSAM(cases.sgd(model), model, mask=0.5)
    with pytest.raises(TypeError, match="mask must be a mask rule"):
        sparsesam.ExtrapolatedSAM(cases.sgd(model), model, mask=0.5)
    with pytest.raises(TypeError, match=r"pattern must be a Pattern, .* got '2:4'"):
        sparsesam.Mask(sparsesam.GradientMagnitude(), "2:4")
    with pytest.raises(TypeError, match="score must be a Score"):
        sparsesam.Mask(0.5, sparsity=0.5)
    with pytest.raises(TypeError, match="inner must be a Pattern"):
        sparsesam.PerLayer("filter")
    with pytest.raises(TypeError, match=r"masks must be .* got \['0.weight'\]"):
        sparsesam.fixed_mask(["0.weight"])
    with pytest.raises(TypeError, match=r"rho_schedule must be .* got 0.5"):
        sam(rho_schedule=0.5)


def test_model_without_parameters_of_optimizer():
    with pytest.raises(ValueError, match="6 of 6 are not in Sequential"):
        sparsesam.SAM(cases.sgd(cases.mlp()), cases.mlp())
    with pytest.raises(ValueError, match="model must have parameters"):
        sparsesam.SAM(cases.sgd(cases.mlp()), nn.ReLU())


def test_foreign_parameter_group_raises_and_is_removed():
    opt = sam()
    with pytest.raises(ValueError, match="not in Sequential"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(opt.param_groups) == 1


def test_step_without_ascent():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model)
    F.cross_entropy(model(cases.vectors()[0]), cases.vectors()[1]).backward()
    with pytest.raises(RuntimeError, match="needs a gradient at w"):
        opt.step()


def test_step_and_ascent_inside_perturbed():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model)
    x, y = cases.vectors()
    before = cases.weights_of(model)
    for misuse in (opt.step, lambda: opt.perturbed().__enter__()):
        F.cross_entropy(model(x), y).backward()
        with pytest.raises(RuntimeError, match=r"inside perturbed|entered twice"), opt.perturbed():
            misuse()
        assert cases.same_bits(before, cases.weights_of(model))


def test_model_that_is_not_a_module():
    model = cases.mlp()
    with pytest.raises(TypeError, match=r"model must be the torch\.nn\.Module .* got 'm'"):
        sparsesam.SAM(cases.sgd(model), "m")


@pytest.mark.parametrize("option", [{"every": 1.5}, {"start": 0.5}, {"every": "2"}])
def test_every_and_start_must_be_integers(option):
    model = cases.mlp()
    (name,) = option
    with pytest.raises(ValueError, match=f"{name} must be an integer"):
        sparsesam.SAM(cases.sgd(model), model, **option)


def test_closure_adding_to_older_gradients():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model)
    x, y = cases.vectors()

    def closure():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    opt.step(closure)  # there are none before the first step
    before = cases.weights_of(model)
    with pytest.raises(RuntimeError, match=r"Clear them in the closure"):
        opt.step(closure)
    assert cases.same_bits(before, cases.weights_of(model))
    opt.zero_grad(set_to_none=False)
    opt.step(closure)  # zeros count as none


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("by", ["wrapper", "base", "model"])
def test_every_way_to_clear_gradients_in_closure_is_accepted(by, to_none):
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model)
    clear = {"wrapper": opt, "base": opt.base, "model": model}[by].zero_grad
    x, y = cases.vectors()

    def closure():
        clear(set_to_none=to_none)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(closure)
    assert opt.steps == 3


@pytest.mark.parametrize("to_none", [True, False])
def test_second_gradient_may_be_cleared_instead_of_used(to_none):
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model)
    x, y = cases.vectors()
    for _ in range(2):
        F.cross_entropy(model(x), y).backward()
        with opt.perturbed():
            F.cross_entropy(model(x), y).backward()
        model.zero_grad(set_to_none=to_none)
    F.cross_entropy(model(x), y).backward()
    with opt.perturbed():
        F.cross_entropy(model(x), y).backward()
    model[0].weight.square().sum().backward()  # a penalty at w, added to the gradient at w + e
    opt.step()
    assert opt.steps == 1


def test_closure_without_gradients():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model)
    before = cases.weights_of(model)
    with pytest.raises(RuntimeError, match="first pass made no gradients"):
        opt.step(lambda: torch.tensor(1.0))

    def only_once():
        if opt.in_second_pass:
            return torch.tensor(1.0)
        return cases.closure_for(model, opt, *cases.vectors())()

    with pytest.raises(RuntimeError, match="second pass made no gradients"):
        opt.step(only_once)
    assert cases.same_bits(before, cases.weights_of(model))


def run_with(mask, model=None, **options):
    model = model or cases.mlp()
    opt = sparsesam.SSAM(cases.sgd(model), model, mask=mask)
    opt.step(cases.closure_for(model, opt, *cases.vectors()), **options)
    return opt


def test_mismatched_fixed_masks():
    with pytest.raises(ValueError, match=r"'4.weigth'.*4.weight"):
        run_with(sparsesam.fixed_mask({"4.weigth": torch.ones(3, 5, dtype=torch.bool)}))
    with pytest.raises(ValueError, match=r"shape \(3, 5\), got \(2,\)"):
        run_with(sparsesam.fixed_mask({"4.weight": torch.ones(2, dtype=torch.bool)}))
    with pytest.raises(ValueError, match="matches no parameter to perturb"):
        run_with(sparsesam.fixed_mask("layer9.*"))
    with pytest.raises(ValueError, match="no such layer"):
        run_with(sparsesam.fixed_mask(types=sparsesam.NORMALIZATION))


def test_too_few_samples_are_all_used_with_warning():
    with pytest.warns(UserWarning, match=r"16.*128|128.*16"):
        opt = run_with(sparsesam.fisher_mask(cases.vectors(16), F.cross_entropy, sparsity=0.5, samples=128))
    assert opt.sparsity == pytest.approx(0.5, abs=0.01)


def test_fisher_from_batch_needs_batch():
    mask = sparsesam.fisher_mask(None, F.cross_entropy, sparsity=0.5)
    with pytest.raises(ValueError, match="batch must be given"):
        run_with(mask)
    assert run_with(mask, batch=cases.vectors()).sparsity == pytest.approx(0.5, abs=0.01)


def test_remainder_can_be_an_error():
    with pytest.raises(ValueError, match="remainder"):
        run_with(sparsesam.random_mask(pattern=sparsesam.NM(1, 2, axis="output", remainder="error")))


def test_first_non_finite_fisher_raises_and_later_ones_are_counted():
    x, y = cases.vectors(16)
    bad = x.clone()
    bad[0] = torch.nan

    def mask(data):
        return sparsesam.fisher_mask((data, y), F.cross_entropy, sparsity=0.5, samples=16, refresh=1)

    with pytest.raises(ValueError, match=r"0\.weight"):
        run_with(mask(bad))
    data = x.clone()
    model = cases.mlp()
    opt = sparsesam.SSAM(cases.sgd(model), model, mask=mask(data))
    opt.step(cases.closure_for(model, opt, x, y))
    kept = opt.masks
    data[0] = torch.nan
    with pytest.warns(RuntimeWarning, match="skipped_refreshes"):
        opt.step(cases.closure_for(model, opt, x, y))
    assert opt.skipped_refreshes == 1
    assert all(torch.equal(kept[name], mask) for name, mask in opt.masks.items())


def test_ssam_d_keeps_mask_when_gradient_is_not_finite():
    model = cases.mlp()
    mask = sparsesam.dynamic_mask(sparsity=0.5, refresh=1)
    opt = sparsesam.SSAM(cases.sgd(model), model, mask=mask)
    x, y = cases.vectors()
    opt.step(cases.closure_for(model, opt, x, y))
    kept = opt.masks
    with pytest.warns(RuntimeWarning):
        opt.step(cases.closure_for(model, opt, x * torch.nan, y))
    assert opt.skipped_refreshes == 1
    assert all(torch.equal(kept[name], mask) for name, mask in opt.masks.items())


def test_copy_inside_perturbed_raises():
    import copy

    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model)
    x, y = cases.vectors()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="copied inside"), opt.perturbed():
        copy.deepcopy(opt)
