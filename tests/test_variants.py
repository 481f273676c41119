"""The methods of the family: each equals its paper's equations, whatever mask, norm, loop or checkpoint."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import sparsesam
from tests import cases, oracles

BASES = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}
WITHOUT_MOMENTUM = ["sgd", "adagrad", "rprop"]
MASKS = {
    "all": lambda model: None,
    "half": lambda model: sparsesam.fixed_mask(cases.half_masks(model)),
    "filters": lambda model: sparsesam.fixed_mask(cases.every_other_filter(model)),
}

# ---- the equations, on flat vectors --------------------------------------------------------------------------


def sam(n, t):
    n.update(n.gradient(n.w + n.e(n.gradient(n.w), 0.3)))


def momentum(n, t):
    states = [n.base.state[p] for p in n.parameters]
    velocity = [s.get("momentum_buffer", s.get("exp_avg")) for s in states]
    n.update(n.gradient(n.w if velocity[0] is None else n.w - n.e(oracles.flat(velocity), 0.7)))


def extrapolated(n, t):
    here, before = n.w, n.kept.get("before", n.w)
    n.update(n.gradient(here + 3.0 * n.mask * (here - before)))
    n.kept["before"] = here


def gsam(n, t):
    g = n.gradient(n.w)
    s = n.gradient(n.w + n.e(g, 0.3))
    orthogonal = g - (g @ s) / (s @ s) * s
    n.update(s - 0.4 * orthogonal)


def wsam(n, t):
    g = n.gradient(n.w)
    s = n.gradient(n.w + n.e(g, 0.3))
    n.update(g)
    n.set(n.w - 0.1 * 0.8 / 0.2 * (s - g))


def wsam_coupled(n, t):
    g = n.gradient(n.w)
    s = n.gradient(n.w + n.e(g, 0.3))
    n.update(g + 0.8 / 0.2 * (s - g))


def look(n, t):
    g = n.gradient(n.w)
    if t % 3 == 0:
        s = n.gradient(n.w + n.e(g, 0.3))
        n.kept["v"] = s - (s @ g) / (g @ g) * g
        n.update(s)
    else:
        v = n.kept["v"]
        n.update(g + 0.7 * g.norm() / v.norm() * v)


def friendly(n, t):
    g = n.gradient(n.w)
    average = n.kept.get("average")
    n.update(n.gradient(n.w + n.e(g if average is None else g - 0.8 * average, 0.3)))
    n.kept["average"] = g if average is None else 0.6 * average + 0.4 * g


def z_sharp(n, t):
    def filtered(g):
        z = ((g - g.mean()) / g.std()).abs()
        return torch.where(z >= z.quantile(0.75), g, 0.0)

    n.update(n.gradient(n.w + n.e(n.by_tensor(filtered, n.gradient(n.w)), 0.3)))


def esam(n, t):
    draws = np.random.default_rng((7, t)).random(len(n.parameters)) < 0.6
    drawn = oracles.flat([torch.full_like(p, float(draw)) for p, draw in zip(n.parameters, draws, strict=True)])
    g = n.gradient(n.w)
    e = n.e(g, 0.3 / 0.6, drawn) if draws.any() else 0
    n.update(n.gradient(n.w + e))


def three_ascents(n, t):
    at, start = n.w, n.w
    for _ in range(3):
        at = at + n.e(n.gradient(at), 0.1)
    assert not torch.equal(at, start)
    n.update(n.gradient(at))


def layer_radius(n, t):
    def e(g, mask):
        return 0.1 * mask * g / (g.norm() if n.norm == "full" else (mask * g).norm())

    n.update(n.gradient(n.w + n.by_tensor(e, n.gradient(n.w), n.mask).nan_to_num()))


def element_radius(n, t):
    scale = n.by_tensor(lambda p: p.abs() + 0.02 if p.dim() > 1 else torch.ones_like(p), n.w)
    n.update(n.gradient(n.w + 0.03 * n.mask * scale * n.gradient(n.w).sign()))


def layerwise_adaptive(n, t):
    g = n.gradient(n.w)
    scale = n.by_tensor(lambda p: torch.ones_like(p) * (p.norm() if p.dim() > 1 else 1.0), n.w)
    length = (scale * g).norm() if n.norm == "full" else (n.mask * scale * g).norm()
    n.update(n.gradient(n.w + 0.2 * n.mask * scale**2 * g / length))


def method(kind, *values, **own):
    """A function of base, model and further options."""
    return lambda base, model, **options: kind(base, model, *values, **own, **options)


METHODS = {
    "SAM": (sam, method(sparsesam.SAM, 0.3)),
    "momentum": (momentum, method(sparsesam.MomentumSAM, 0.7)),
    "GSAM": (gsam, method(sparsesam.GSAM, 0.3, alpha=0.4)),
    "WSAM": (wsam, method(sparsesam.WSAM, 0.3, gamma=0.8)),
    "WSAM coupled": (wsam_coupled, method(sparsesam.WSAM, 0.3, gamma=0.8, decouple=False)),
    "LookSAM": (look, method(sparsesam.LookSAM, 0.3, every=3)),
    "FriendlySAM": (friendly, method(sparsesam.FriendlySAM, 0.3, sigma=0.8, decay=0.6)),
    "ZSharp": (z_sharp, method(sparsesam.ZSharp, 0.3, quantile=0.75)),
    "ESAM": (esam, method(sparsesam.ESAM, 0.3, beta=0.6, seed=7)),
    "three ascents": (three_ascents, method(sparsesam.SAM, 0.3, ascent_steps=3)),
    "layer radius": (layer_radius, method(sparsesam.SAM, 0.1, radius="layer")),
    "element radius": (element_radius, method(sparsesam.SAM, 0.03, radius="element", adaptive=True, eta=0.02)),
    "layerwise ASAM": (layerwise_adaptive, method(sparsesam.SAM, 0.2, adaptive="layer")),
    "extrapolation": (
        extrapolated, lambda *given, norm="masked", **options: sparsesam.ExtrapolatedSAM(*given, 0.015, **options)
    ),
}  # fmt: skip


def make(name, model, base=cases.sgd, **options):
    return METHODS[name][1](base(model), model, **options)


train = partial(cases.train, step=cases.by_minimize)


def assert_equals_naive(equation, wrap, base, mask, norm):
    model, twin = cases.mlp(), cases.mlp()
    opt = wrap(BASES[base](model.parameters()), model, mask=MASKS[mask](model))
    train(model, opt, range(7))
    naive = oracles.Naive(twin, BASES[base](twin.parameters()), None if mask == "all" else opt.masks.values(), norm)
    for seed in range(7):
        naive.x, naive.y = cases.vectors(seed=seed)
        equation(naive, seed)
    cases.assert_close(model, twin)


@pytest.mark.parametrize("norm", ["full", "masked"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("implementation", ["host", "accelerator"])
@pytest.mark.parametrize("name", METHODS)
def test_method_equals_equations(name, implementation, mask, norm):
    equation, wrap = METHODS[name]
    with cases.moved_as_on(implementation):
        assert_equals_naive(equation, lambda *given, **o: wrap(*given, norm=norm, **o), "momentum", mask, norm)


@pytest.mark.parametrize("base", [name for name in BASES if name not in WITHOUT_MOMENTUM])
def test_momentum_of_every_base_equals_equation(base):
    assert_equals_naive(*METHODS["momentum"], base, "half", "full")


@pytest.mark.parametrize("base", [*WITHOUT_MOMENTUM, "adamw"])
def test_extrapolation_with_other_bases_equals_equation(base):
    assert_equals_naive(*METHODS["extrapolation"], base, "half", "masked")


# ---- limits --------------------------------------------------------------------------------------------------

IS_SAM = {
    "GSAM, alpha 0": method(sparsesam.GSAM, 0.3, alpha=0.0),
    "WSAM, gamma 1/2": method(sparsesam.WSAM, 0.3, gamma=0.5, decouple=False),
    "LookSAM, every step": method(sparsesam.LookSAM, 0.3, every=1),
    "FriendlySAM, sigma 0": method(sparsesam.FriendlySAM, 0.3, sigma=0.0),
    "ZSharp, quantile 0": method(sparsesam.ZSharp, 0.3, quantile=0.0),
    "ESAM, beta 1": method(sparsesam.ESAM, 0.3, beta=1.0),
    "one ascent step": method(sparsesam.SAM, 0.3, ascent_steps=1),
}


@pytest.mark.parametrize("name", IS_SAM)
def test_limit_is_sam(name):
    model, twin = cases.mlp(), cases.mlp()
    train(model, IS_SAM[name](cases.sgd(model), model), range(5))
    train(twin, sparsesam.SAM(cases.sgd(twin), twin, 0.3), range(5))
    tolerance = 1e-10 if "WSAM" in name else 0.0  # g + (s - g) is rounded
    cases.assert_close(model, twin, rtol=tolerance, atol=tolerance / 1000)


@pytest.mark.parametrize("name", METHODS)
def test_sparsity_zero_equals_no_mask_and_one_equals_base(name):
    models = [cases.mlp() for _ in range(4)]
    for model, sparsity in zip(models[:3], (None, 0.0, 1.0), strict=True):
        mask = None if sparsity is None else sparsesam.random_mask(sparsity=sparsity)
        train(model, make(name, model, mask=mask), range(5))
    cases.train(models[3], cases.sgd(models[3]), range(5))
    dense, zero, one, plain = map(cases.weights_of, models)
    assert cases.same_bits(dense, zero)
    assert cases.same_bits(one, plain)
    assert not cases.same_bits(dense, plain)


# ---- state ---------------------------------------------------------------------------------------------------

RULES = {
    "none": lambda: None,
    "dynamic": lambda: sparsesam.dynamic_mask(sparsity=0.5, refresh=2),
    "random filters": lambda: sparsesam.random_mask(sparsity=0.5, pattern="filter", refresh=3),
}


@pytest.mark.parametrize("norm", ["full", "masked"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", METHODS)
def test_resumed_run_equals_uninterrupted(name, rule, norm):
    def new(model):
        groups = [{"params": model[:3].parameters()}, {"params": model[3:].parameters(), "perturb": False}]
        return METHODS[name][1](torch.optim.SGD(groups, lr=0.1, momentum=0.9), model, mask=RULES[rule](), norm=norm)

    cases.assert_resumes(new)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "extrapolation"])
def test_model_may_change_its_dtype(name):
    model, twin = cases.mlp(), cases.mlp()
    opt, other = make(name, model), make(name, twin)
    train(model, opt, range(4))
    train(twin, other, range(4))
    model.float()
    for seed in range(4, 7):
        x, y = cases.vectors(seed=seed)
        opt.minimize(lambda x=x, y=y: F.cross_entropy(model(x.float()), y))
    train(twin, other, range(4, 7))
    weights = [p.double() for p in cases.weights_of(model)]
    torch.testing.assert_close(weights, cases.weights_of(twin), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("norm", "covered"), [("full", torch.numel), ("masked", torch.sum)])
def test_friendly_average_covers_what_the_norm_needs(norm, covered):
    model = cases.mlp()
    masks = cases.half_masks(model)
    opt = make("FriendlySAM", model, mask=sparsesam.fixed_mask(masks), norm=norm)
    train(model, opt, range(2))
    kept = opt.own.tensors["average"].values()
    assert sum(int(part.count_nonzero()) for part in kept) == sum(int(covered(mask)) for mask in masks.values())


def test_esam_leaves_out_gradients_of_tensors_not_drawn():
    model, opt = cases.made(sparsesam.ESAM, 0.3, beta=0.5)
    shares = []
    for seed in range(8):
        train(model, opt, [seed])
        shares.append(opt.savings().gradients)
    assert len(set(shares)) > 3
    assert all(0 < share < 1 for share in shares)


# ---- gradients that are scaled or not finite -----------------------------------------------------------------


SCALED = ["GSAM", "WSAM coupled", "LookSAM", "ZSharp", "ESAM", "three ascents", "layer radius", "element radius"]


@pytest.mark.parametrize("name", SCALED)
def test_scaler_does_not_change_the_step(name):
    model, twin = cases.mlp(torch.float32), cases.mlp(torch.float32)
    opt, other = make(name, model), make(name, twin)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for seed in range(6):
        x, y = cases.vectors(dtype=torch.float32, seed=seed)
        opt.minimize(lambda x=x, y=y: F.cross_entropy(model(x), y), scaler=scaler)
        scaler.update()
        other.minimize(lambda x=x, y=y: F.cross_entropy(twin(x), y))
    cases.assert_close(model, twin, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("in_two_phases", [False, True])
@pytest.mark.parametrize("name", ["FriendlySAM", "WSAM"])
def test_scaler_is_refused_where_its_scale_would_stay(name, in_two_phases):
    model = cases.mlp(torch.float32)
    opt, before = make(name, model), cases.weights_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    x, y = cases.vectors(dtype=torch.float32)
    if in_two_phases:
        with opt.first_pass():
            opt.backward(scaler.scale(F.cross_entropy(model(x), y)))
        with opt.perturbed():
            scaler.scale(F.cross_entropy(model(x), y)).backward()
    with pytest.raises(RuntimeError, match="does not work with a GradScaler"):
        scaler.step(opt) if in_two_phases else opt.minimize(lambda: F.cross_entropy(model(x), y), scaler=scaler)
    assert cases.same_bits(before, cases.weights_of(model))


@pytest.mark.parametrize("implementation", ["host", "accelerator"])
@pytest.mark.parametrize(
    "name", [name for name in METHODS if name not in ("momentum", "extrapolation", "three ascents")]
)
@pytest.mark.parametrize("before", [0, 3])
def test_gradient_at_w_that_is_not_finite_does_not_poison_the_run(name, implementation, before):
    with cases.moved_as_on(implementation):
        model = cases.mlp()
        opt = make(name, model)
        train(model, opt, range(before))
        x, y = cases.vectors()
        factors = iter([math.inf, 1.0])
        with pytest.warns(RuntimeWarning) if implementation == "host" else nullcontext():
            opt.minimize(lambda: F.cross_entropy(model(x), y) * next(factors))
        train(model, opt, range(3, 6))
        assert (opt.skipped_ascents, opt.skipped_steps) == (1, 0)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("ended_by", ["not finite", "error"])
def test_sharpness_term_of_a_step_not_taken_is_dropped(ended_by):
    """The next step, a plain one, once applied it."""
    model, opt = cases.made(sparsesam.WSAM, every=2)
    x, y = cases.vectors()
    if ended_by == "not finite":
        with pytest.warns(RuntimeWarning, match="not finite"):
            opt.minimize(lambda: F.cross_entropy(model(x), y) * math.nan)
    else:
        hook = opt.base.register_step_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(model, opt, range(1))
        hook.remove()
        opt.param_groups[0]["rho"] = 0.0
    plain = copy.deepcopy(model)
    train(model, opt, range(1))
    cases.train(plain, cases.sgd(plain), range(1))
    assert cases.same_state(model, plain)


# ---- what does not go together -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("momentum", {"ascent_fraction": 0.25}),
        ("momentum", {"ascent_steps": 2}),
        ("momentum", {"ascent_scope": "local"}),
        ("LookSAM", {"ascent_scope": "local"}),
        ("FriendlySAM", {"ascent_scope": "local"}),
        ("GSAM", {"ascent_fraction": 0.25}),
        ("FriendlySAM", {"ascent_steps": 2}),
        ("ZSharp", {"ascent": "implicit", "norm": "masked"}),
        ("GSAM", {"ascent": "implicit", "norm": "masked"}),
        ("three ascents", {"ascent": "implicit", "norm": "masked"}),
    ],
)
def test_options_that_do_not_go_together_raise(name, options):
    model = cases.mlp()
    option = next(iter(options))
    with pytest.raises(ValueError, match=f"{option} must be .*, got {options[option]!r}: "):
        make(name, model, mask=sparsesam.fixed_mask("0.*"), **options)


def test_several_ascent_steps_in_two_phases_raise():
    model = cases.mlp()
    opt = make("three ascents", model)
    with pytest.raises(RuntimeError, match="a step has 4 passes: use minimize"):
        cases.in_two_phases(opt, model, *cases.vectors())


def test_combined_gradients_must_be_dense():
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=True))
    opt = sparsesam.GSAM(torch.optim.SGD(model.parameters(), lr=0.1), model, 0.1)
    with pytest.raises(TypeError, match="must be dense: make layers sparse=False"):
        opt.minimize(lambda: model(torch.tensor([1, 2])).square().sum())


# ---- the momentum of the base --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        sparsesam.MomentumSAM,
        method(sparsesam.ExtrapolatedSAM, mask=sparsesam.dynamic_mask(sparsity=0.5, refresh=2)),
    ],
)
def test_base_without_momentum_raises_at_construction_or_in_step(wrap):
    model = cases.mlp()
    with pytest.raises(ValueError, match="base must have a momentum, got SGD with momentum=0"):
        wrap(cases.sgd(model, momentum=0), model)
    opt = wrap(torch.optim.Adagrad(model.parameters()), model)
    with pytest.raises(ValueError, match="base must have a momentum, but Adagrad keeps only step, sum"):
        train(model, opt, range(2))


def test_mask_scored_by_momentum_waits_for_it():
    model = cases.mlp()
    rule = sparsesam.Mask(score=sparsesam.GradientMagnitude(), sparsity=0.5, refresh=1)
    opt = sparsesam.MomentumSAM(cases.sgd(model), model, rho=0.3, mask=rule)
    train(model, opt, range(1))
    assert opt.masks == {}
    momentum = oracles.flat([opt.state[p]["momentum_buffer"].clone() for p in model.parameters()]).abs()
    train(model, opt, [2])
    kept = oracles.flat(list(opt.masks.values()))
    assert momentum[kept].min() >= momentum[~kept].max()
