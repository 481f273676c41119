"""Masks as the optimizer uses them: which weights, how many, when."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import sparsesam
from tests import cases
from tests.oracles import fisher_by_definition


def wrap(mask, model=None, **options):
    model = model if model is not None else cases.convnet()
    return model, sparsesam.SSAM(cases.sgd(model), model, rho=0.1, mask=mask, **options)


def step(model, opt, seed=1, **options):
    x, y = cases.images(seed=seed)
    return opt.step(cases.closure_for(model, opt, x, y), **options)


def kept(masks):
    return sum(int(mask.sum()) for mask in masks.values())


def size(model):
    return sum(p.numel() for p in model.parameters())


RULES = {
    "fisher": partial(sparsesam.fisher_mask, cases.images(32), F.cross_entropy, samples=8, labels="sampled"),
    "random": sparsesam.random_mask,
    "dynamic": sparsesam.dynamic_mask,
    **{
        f"{drop}, {growth}": partial(sparsesam.dynamic_mask, drop=drop, growth=growth)
        for drop in ("flattest", "sharpest", "random", "weight")
        for growth in ("random", "gradient", "weight", sparsesam.GradientMagnitude())
    },
}


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("kind", RULES)
def test_unstructured_masks_have_exact_size(kind, sparsity):
    model, opt = wrap(RULES[kind](refresh=1, sparsity=sparsity))
    assert (opt.masks, opt.sparsity) == ({}, None)
    for _ in range(3):
        step(model, opt)
        assert kept(opt.masks) == round((1 - sparsity) * size(model))
    assert opt.sparsity == pytest.approx(1 - kept(opt.masks) / size(model))


PATTERNS = ["unstructured", "filter", "column", "tensor", "1:2", "1:4", "2:4", "1:8 input", "1:2 filters"]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", ["random", "dynamic", "fisher"])
def test_every_pattern_trains_with_every_score(kind, pattern):
    sparsity = None if ":" in pattern else 0.5
    model, opt = wrap(RULES[kind](refresh=1, sparsity=sparsity, pattern=pattern))
    losses = [step(model, opt).item() for _ in range(6)]
    assert losses[-1] < losses[0]
    assert 0 < kept(opt.masks) < size(model)
    if sparsity is not None:
        assert kept(opt.masks) <= round(0.5 * size(model))


def test_ssam_f_perturbs_weights_with_most_fisher_information():
    data = cases.images(24, torch.float64)
    rule = sparsesam.fisher_mask(data, F.cross_entropy, sparsity=0.7, samples=24)
    model, opt = wrap(rule, cases.convnet(torch.float64))
    squares = fisher_by_definition(model, *data, F.cross_entropy)  # eq. 6 of the paper
    opt.refresh_mask(now=True)
    everything = torch.cat([s.reshape(-1) for s in squares.values()])
    threshold = everything.sort(descending=True).values[round(0.3 * len(everything)) - 1]
    assert all(torch.equal(opt.masks[name], square >= threshold) for name, square in squares.items())


def test_ssam_d_drops_flattest_and_grows_as_many():
    model, opt = wrap(sparsesam.dynamic_mask(sparsity=0.5, drop_ratio=0.4, refresh=1))
    step(model, opt)
    before = opt.masks
    x, y = cases.images(seed=2)
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    flatness = {name: p.grad.abs().clone() for name, p in model.named_parameters()}
    with opt.perturbed():
        F.cross_entropy(model(x), y).backward()
    after = opt.masks
    flattest = torch.cat([flatness[n][before[n]] for n in before]).sort().values[: round(0.4 * kept(before))]
    gone = torch.cat([flatness[n][before[n] & ~after[n]] for n in before])
    assert 0 < len(gone) < len(flattest)  # some are grown again by chance
    assert gone.max() <= flattest[-1]
    assert kept(after) == kept(before)


def test_drop_ratio_decays_with_cosine():
    mask = sparsesam.dynamic_mask(sparsity=0.5, drop_ratio=0.3, total_steps=10, refresh=1)
    for t in range(13):
        assert mask.ratio(t) == pytest.approx(0.15 * (1 + math.cos(math.pi * min(t, 10) / 10)))


@pytest.mark.parametrize(("refresh", "changes"), [(3, [3, 6]), (4, [4]), (None, [])])
def test_mask_is_refreshed_after_given_number_of_steps(refresh, changes):
    model, opt = wrap(sparsesam.random_mask(sparsity=0.5, refresh=refresh))
    seen = []
    for _ in range(7):
        step(model, opt)
        seen.append(opt.masks["4.weight"])
    assert [t for t in range(1, 7) if not torch.equal(seen[t - 1], seen[t])] == changes


def test_manual_refresh():
    model, opt = wrap(sparsesam.random_mask(sparsity=0.5))
    opt.refresh_mask(now=True)
    first = opt.masks["4.weight"]
    step(model, opt)
    opt.refresh_mask()
    assert torch.equal(opt.masks["4.weight"], first)
    step(model, opt)
    assert not torch.equal(opt.masks["4.weight"], first)


def test_masks_depend_on_seed_and_do_not_change_global_generator():
    def first_mask(seed, disturbance):
        model, opt = wrap(sparsesam.random_mask(sparsity=0.5, seed=seed))
        torch.manual_seed(disturbance)
        state = torch.get_rng_state()
        step(model, opt)
        assert torch.equal(state, torch.get_rng_state())
        return opt.masks["4.weight"]

    assert torch.equal(first_mask(1, 10), first_mask(1, 20))
    assert not torch.equal(first_mask(1, 10), first_mask(2, 10))


def test_fisher_from_batch():
    model, opt = wrap(sparsesam.fisher_mask(None, F.cross_entropy, sparsity=0.5))
    step(model, opt, batch=cases.images(seed=1))
    direct, other = wrap(sparsesam.fisher_mask(cases.images(16, seed=1), F.cross_entropy, sparsity=0.5, samples=16))
    step(direct, other)
    assert sum(int((opt.masks[n] != other.masks[n]).sum()) for n in opt.masks) <= 2


HALF = cases.half_masks(cases.convnet())


@pytest.mark.parametrize(
    ("rule", "whole"),
    [
        (sparsesam.fixed_mask("0.*", "4.bias"), {"0.weight", "0.bias", "4.bias"}),
        (sparsesam.fixed_mask(types=sparsesam.NORMALIZATION), {"1.weight", "1.bias"}),
        (
            sparsesam.fixed_mask(types=(torch.nn.Linear, lambda module: hasattr(module, "running_mean"))),
            {"1.weight", "1.bias", "4.weight", "4.bias"},
        ),
        (sparsesam.fixed_mask(HALF), None),
    ],
)
def test_fixed_masks_by_name_type_and_tensor(rule, whole):
    model, opt = wrap(rule)
    step(model, opt)
    expected = HALF if whole is None else {name: torch.full_like(mask, name in whole) for name, mask in HALF.items()}
    assert all(torch.equal(opt.masks[name], mask) for name, mask in expected.items())


def test_dropping_and_growing_by_weight_magnitude_keeps_largest_weights():
    model, opt = wrap(sparsesam.dynamic_mask(sparsity=0.5, drop="weight", growth="weight", drop_ratio=1.0, refresh=1))
    step(model, opt)
    expected = sparsesam.Unstructured().select({name: p.detach().abs() for name, p in model.named_parameters()}, 0.5)
    step(model, opt)
    assert all(torch.equal(mask, expected[name]) for name, mask in opt.masks.items())


@pytest.mark.parametrize("keep", ["largest", "smallest"])
@pytest.mark.parametrize(
    ("score", "of"),
    [
        (sparsesam.GradientMagnitude(), lambda p: p.grad.abs()),
        (sparsesam.WeightMagnitude(), lambda p: p.detach().abs()),
    ],
    ids=["gradient", "weight"],
)
def test_mask_keeps_filters_by_mean_score(score, of, keep):
    pattern = sparsesam.PerLayer(sparsesam.Structured("filter"))
    model, opt = wrap(sparsesam.Mask(score, pattern, 0.5, keep=keep), cases.convnet(torch.float64))
    x, y = cases.images(dtype=torch.float64)
    F.cross_entropy(model(x), y).backward()
    scores = {name: of(p) * (1 if keep == "largest" else -1) for name, p in model.named_parameters()}
    with opt.perturbed():
        F.cross_entropy(model(x), y).backward()
    expected = pattern.select(scores, 0.5)
    assert all(torch.equal(mask, expected[name]) for name, mask in opt.masks.items())
