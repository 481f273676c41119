"""The step: it equals the naive oracle, its three ways give the same result, nothing is left behind."""

from __future__ import annotations

import copy
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from sparsesam.compile_blocks import COMPILES_WITHIN_MODES
from tests import cases, oracles, test_variants

# ---- the equations -----------------------------------------------------------------------------------------------


def assert_equals_oracle(make, base, **options):
    model, twin = cases.mlp(), cases.mlp()
    opt, twin_base = make(base(model), model), base(twin)
    for seed in range(10):
        x, y = cases.vectors(seed=seed)
        loss = opt.step(cases.closure_for(model, opt, x, y))
        expected = oracles.ssam_step(twin, twin_base, lambda m, x=x, y=y: F.cross_entropy(m(x), y), **options)
        torch.testing.assert_close(loss, expected)  # the loss at w
    cases.assert_close(model, twin, rtol=1e-12)


@pytest.mark.parametrize("base", [partial(cases.sgd, weight_decay=1e-3), lambda m: torch.optim.Adam(m.parameters())])
def test_sam_equals_oracle(base):
    assert_equals_oracle(partial(sparsesam.SAM, rho=0.2), base, rho=0.2)


@pytest.mark.parametrize("norm", ["full", "masked"])
@pytest.mark.parametrize("adaptive", [False, "all"])
def test_ssam_equals_oracle(norm, adaptive):
    masks = cases.half_masks(cases.mlp())
    make = partial(sparsesam.SSAM, rho=0.3, mask=sparsesam.fixed_mask(masks), norm=norm, adaptive=adaptive)
    options = {"rho": 0.3, "masks": masks.values(), "norm": norm, "eta": 0.01 if adaptive else None}
    assert_equals_oracle(make, cases.sgd, **options)


def method(kind, *values, base=cases.sgd, **options):
    return lambda model: kind(base(model), model, *values, **options)


NOTHING = {"mask": sparsesam.random_mask(sparsity=1.0)}
PLAIN = {
    "rho 0": method(sparsesam.SAM, 0.0),
    "rho 0, a part of the batch": method(sparsesam.SAM, 0.0, ascent_fraction=0.25),
    "sparsity 1": method(sparsesam.SSAM, 0.5, **NOTHING),
    "sparsity 1, a part of the batch": method(sparsesam.SSAM, 0.5, ascent_fraction=0.25, **NOTHING),
    "extrapolation, rho 0": method(sparsesam.ExtrapolatedSAM, 0.0),
    "extrapolation, sparsity 1": method(sparsesam.ExtrapolatedSAM, 0.5, **NOTHING),
}


@pytest.mark.parametrize("name", PLAIN)
def test_nothing_perturbed_equals_base_optimizer_bitwise(name):
    results = []
    for make in (PLAIN[name], cases.sgd):
        model = nn.Sequential(cases.convnet(), nn.Dropout(0.5))  # dropout: also the random stream must not move
        opt = make(model)
        torch.manual_seed(3)
        for seed in range(8):
            batch = cases.images(seed=seed)
            if make is cases.sgd:
                cases.with_closure(opt, model, *batch)
            else:
                opt.minimize(lambda batch, model=model: F.cross_entropy(model(batch[0]), batch[1]), batch=batch)
        results.append([*model.state_dict().values(), torch.get_rng_state()])
    assert cases.same_bits(*results)


# ---- its three ways ----------------------------------------------------------------------------------------------


def parts():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2))
    return nn.ModuleDict({"body": body, "head": nn.Linear(4 * 36, 3)}).double()


def loss_of(model, x, y):
    return F.cross_entropy(model["head"](model["body"](x).flatten(1)), y)


def take_step(way, opt, model, x, y):
    return cases.WAYS[way](opt, lambda: loss_of(model, x, y))


def with_a_still_body(model):
    groups = [{"params": model["body"].parameters(), "rho": 0.0}, {"params": model["head"].parameters()}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


HEAD = {"mask": sparsesam.fixed_mask("head.*")}
OPTIMIZERS = {
    "last layer": cases.ssam,
    "last layer, full norm": partial(cases.ssam, norm="full"),
    "last layer, Adam, ASAM": method(
        sparsesam.SSAM, 0.3, adaptive=True, base=lambda model: torch.optim.AdamW(model.parameters()), **HEAD
    ),
    "half": lambda model: cases.ssam(model, cases.half_masks(model)),
    "SSAM-D": lambda model: cases.ssam(model, sparsesam.dynamic_mask(sparsity=0.5, refresh=2)),
    "every other step": partial(cases.ssam, every=2),
    "from the third step": partial(cases.ssam, start=2),
    "body with a rho of 0": method(sparsesam.SAM, 0.3, norm="masked", base=with_a_still_body),
    "FriendlySAM, last layer": method(sparsesam.FriendlySAM, 0.3, norm="masked", **HEAD),
    "FriendlySAM, other tensors in each step": method(
        sparsesam.FriendlySAM, 0.3, norm="masked", mask=sparsesam.random_mask(sparsity=0.9, pattern="tensor", refresh=1)
    ),
    **{name: partial(test_variants.make, name) for name in test_variants.METHODS if name != "three ascents"},
}


def trained(make, way):
    model = parts()
    opt = make(model)
    torch.manual_seed(1)
    losses = [take_step(way, opt, model, *cases.images(dtype=torch.float64, seed=seed)) for seed in range(5)]
    return [*model.state_dict().values(), *losses, torch.get_rng_state()]


@pytest.mark.parametrize("way", list(cases.WAYS)[1:])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_ways_give_the_same_bits(name, way):
    assert cases.same_bits(trained(OPTIMIZERS[name], way), trained(OPTIMIZERS[name], "minimize"))


class UnregisteredDict(dict):
    """A type that is not registered with torch's pytrees."""


class UnregisteredList(list):
    pass


def test_result_of_closure_is_detached_and_keeps_its_type():
    model, opt = cases.made(sparsesam.SAM, rho=0.5)
    returned, (x, y) = [], cases.vectors()

    def closure():
        opt.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        returned.append(UnregisteredDict(loss=loss, parts=UnregisteredList([output, (output, "note")])))
        return returned[-1]

    result = opt.step(closure)
    assert (type(result), type(result["parts"])) == (UnregisteredDict, UnregisteredList)
    first, (second, note) = result["parts"]
    assert note == "note"
    assert not any(tensor.requires_grad for tensor in (result["loss"], first, second))
    assert returned[0]["parts"][0].requires_grad  # the closure's own objects are unchanged


# ---- minimize ----------------------------------------------------------------------------------------------------


def test_auxiliary_outputs_are_those_of_the_first_pass_and_detached():
    model, opt = cases.made(sparsesam.SAM, rho=0.5)
    x, y = cases.vectors()
    expected = model(x).detach()

    def loss():
        output = model(x)
        return F.cross_entropy(output, y), {"output": output, "note": "kept"}

    value, aux = opt.minimize(loss, has_aux=True)
    assert torch.equal(value, F.cross_entropy(expected, y))
    assert torch.equal(aux["output"], expected)
    assert not aux["output"].requires_grad
    assert aux["note"] == "kept"


def test_list_of_functions_accumulates():
    model, twin = cases.mlp(), cases.mlp()
    opt, other = cases.ssam(model, "4.*"), cases.ssam(twin, "4.*")
    for seed in range(3):
        x, y = cases.vectors(16, seed=seed)
        micro = [lambda a=a, b=b: F.cross_entropy(model(a), b) / 4 for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
        loss = opt.minimize(micro)
        expected = other.minimize(lambda x=x, y=y: F.cross_entropy(twin(x), y))
        torch.testing.assert_close(loss, expected)
    cases.assert_close(model, twin, rtol=1e-10)
    assert opt.savings().gradients > 0
    assert "several functions" in opt.savings().ended


def backward_inside(model, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (backward_inside, RuntimeError, "must not call backward"),
        (lambda model, x, y: model(x), ValueError, "loss must return one number"),
        (lambda model, x, y: None, ValueError, "loss must return one number, got NoneType"),
    ],
)
def test_function_that_is_no_loss_raises_and_changes_nothing(loss, error, words):
    model, opt = cases.made(sparsesam.SAM)
    before = cases.weights_of(model)
    with pytest.raises(error, match=words):
        opt.minimize(lambda: loss(model, *cases.vectors()))
    assert cases.same_bits(before, cases.weights_of(model))
    assert opt.steps == 0


# ---- nothing is left behind --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", cases.WAYS)
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("failing_pass", [1, 2])
@pytest.mark.parametrize("name", ["SAM", "last layer", "half", "GSAM"])
def test_nothing_of_ours_stays_after_an_error(name, failing_pass, error, way):
    model = parts()
    opt = OPTIMIZERS[name](model)
    x, y = cases.images(dtype=torch.float64)
    take_step(way, opt, model, x, y)
    weights = cases.weights_of(model)
    twin, other = copy.deepcopy((model, opt))
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == failing_pass:
            raise error

    handle = model["head"].register_forward_hook(fail)
    with pytest.raises(error):
        take_step(way, opt, model, x, y)
    handle.remove()
    assert cases.same_bits(weights, cases.weights_of(model))
    assert cases.modes() == cases.hooks_of(model) == 0
    for one, of in ((opt, model), (other, twin)):  # the next step is that of a run without the error
        torch.manual_seed(5)
        take_step(way, one, of, x, y)
    assert cases.same_bits(cases.weights_of(model), cases.weights_of(twin))


def test_few_files_of_ours_are_entered():
    """A reader of a step opens these, and no others."""

    def files(opt, model):
        seen = set()

        def note(frame, event, _):
            name = frame.f_code.co_filename
            if "sparsesam" in name and event == "call":
                seen.add(name.rpartition("sparsesam/")[2])

        batch = cases.images(dtype=torch.float64)
        for _ in range(2):
            take_step("minimize", opt, model, *batch)
        sys.setprofile(note)
        try:
            take_step("minimize", opt, model, *batch)
        finally:
            sys.setprofile(None)
        return sorted(seen)

    # An older torch must be asked whether the model is compiled.
    for name, limit in (("SAM", 7), ("last layer", 10 if COMPILES_WITHIN_MODES else 11)):
        model = parts()
        found = files(OPTIMIZERS[name](model), model)
        assert len(found) <= limit, " ".join(found)
