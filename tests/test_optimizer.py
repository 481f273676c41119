"""The step itself: against the naive oracle, against other optimizers, and at the limits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from tests import cases, oracles

BASES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def pair(base="sgd"):
    """The same model twice, with the same base optimizer."""
    model = cases.mlp()
    twin = copy.deepcopy(model)
    return model, BASES[base](model.parameters()), twin, BASES[base](twin.parameters())


@pytest.mark.parametrize("base", BASES)
def test_sam_equals_oracle(base):
    model, inner, twin, twin_base = pair(base)
    opt = sparsesam.SAM(inner, model, rho=0.2)
    for seed in range(10):
        x, y = cases.vectors(seed=seed)
        loss = opt.step(cases.closure_for(model, opt, x, y))
        expected = oracles.ssam_step(twin, twin_base, lambda m, x=x, y=y: F.cross_entropy(m(x), y), rho=0.2)
        torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(twin), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", ["full", "masked"])
@pytest.mark.parametrize("adaptive", [False, "all"])
def test_ssam_equals_oracle(norm, adaptive):
    model, inner, twin, twin_base = pair()
    masks = cases.half_masks(model)
    opt = sparsesam.SSAM(inner, model, rho=0.3, mask=sparsesam.fixed_mask(masks), norm=norm, adaptive=adaptive)
    for seed in range(10):
        x, y = cases.vectors(seed=seed)
        opt.step(cases.closure_for(model, opt, x, y))
        oracles.ssam_step(
            twin,
            twin_base,
            lambda m, x=x, y=y: F.cross_entropy(m(x), y),
            rho=0.3,
            masks=list(masks.values()),
            norm=norm,
            eta=0.01 if adaptive else None,
        )
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(twin), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("adaptive", [False, "all"])
def test_fifty_steps_equal_sam_of_pytorch_optimizer(adaptive):
    OtherSAM = pytest.importorskip("pytorch_optimizer").SAM

    model = cases.mlp()
    twin = copy.deepcopy(model)
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.1, adaptive=adaptive, eta=0.0)
    other = OtherSAM(twin.parameters(), torch.optim.SGD, rho=0.1, adaptive=bool(adaptive), lr=0.1, momentum=0.9)
    for seed in range(50):
        x, y = cases.vectors(seed=seed)
        opt.step(cases.closure_for(model, opt, x, y))
        F.cross_entropy(twin(x), y).backward()
        other.first_step(zero_grad=True)
        F.cross_entropy(twin(x), y).backward()
        other.second_step(zero_grad=True)
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(twin), rtol=1e-5, atol=1e-7)


def train(make, model, steps=8):
    opt = make(model)
    for seed in range(steps):
        x, y = cases.images(seed=seed)
        opt.step(cases.closure_for(model, opt, x, y))
    return [*cases.weights_of(model), *[b.clone() for b in model.buffers()]]


@pytest.mark.parametrize(
    "make",
    [
        lambda m: sparsesam.SAM(cases.sgd(m), m, rho=0.0),
        lambda m: sparsesam.SSAM(cases.sgd(m), m, rho=0.1, mask=sparsesam.random_mask(sparsity=1.0)),
    ],
    ids=["rho 0", "sparsity 1"],
)
def test_nothing_perturbed_equals_base_optimizer_bitwise(make):
    model = nn.Sequential(cases.convnet(), nn.Dropout(0.5))  # dropout: also the random stream must not move
    twin = copy.deepcopy(model)
    torch.manual_seed(3)
    ours = train(make, model)
    torch.manual_seed(3)
    assert cases.same_bits(ours, train(cases.sgd, twin))


def test_sparsity_zero_equals_sam_bitwise():
    model = cases.convnet()
    twin = copy.deepcopy(model)
    dense = sparsesam.random_mask(sparsity=0.0)
    ours = train(lambda m: sparsesam.SSAM(cases.sgd(m), m, rho=0.1, mask=dense), model)
    assert cases.same_bits(ours, train(lambda m: sparsesam.SAM(cases.sgd(m), m, rho=0.1), twin))


@pytest.mark.parametrize("norm", ["full", "masked"])
def test_perturbation_stays_in_ball_and_mask(norm):
    model = cases.mlp()
    masks = cases.half_masks(model)
    opt = sparsesam.SSAM(cases.sgd(model), model, rho=0.25, mask=sparsesam.fixed_mask(masks), norm=norm)
    x, y = cases.vectors()
    before = cases.weights_of(model)
    F.cross_entropy(model(x), y).backward()
    with opt.perturbed():
        moves = [now - then for now, then in zip(cases.weights_of(model), before, strict=True)]
        assert all((move[~mask] == 0).all() for move, mask in zip(moves, masks.values(), strict=True))
        length = oracles.flat(moves).norm()
        assert length <= 0.25 + 1e-12
        if norm == "masked":
            torch.testing.assert_close(length, torch.tensor(0.25, dtype=torch.float64))
    assert cases.same_bits(before, cases.weights_of(model))


def test_two_phases_equal_closure_bitwise():
    model = cases.convnet()
    twin = copy.deepcopy(model)
    opt, other = (sparsesam.SAM(cases.sgd(m), m, rho=0.1) for m in (model, twin))
    for seed in range(5):
        x, y = cases.images(seed=seed)
        opt.step(cases.closure_for(model, opt, x, y))
        other.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        with other.perturbed():
            F.cross_entropy(twin(x), y).backward()
        other.step()
    assert cases.same_bits(cases.weights_of(model), cases.weights_of(twin))


def test_returned_loss_is_the_one_at_w():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.5)
    x, y = cases.vectors()
    expected = F.cross_entropy(model(x), y).item()
    assert opt.step(cases.closure_for(model, opt, x, y)).item() == expected


class UnregisteredDict(dict):
    """A type that is not registered with torch's pytrees."""


class UnregisteredList(list):
    pass


@pytest.mark.parametrize("kind", [dict, UnregisteredDict])
def test_result_of_closure_is_detached_and_keeps_its_type(kind):
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.5)
    x, y = cases.vectors()

    def closure():
        opt.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        closure.result = kind(loss=loss, parts=UnregisteredList([output, (output, "note")]))
        return closure.result

    result = opt.step(closure)
    assert type(result) is kind
    assert type(result["parts"]) is UnregisteredList
    assert not any(one.requires_grad for one in (result["loss"], result["parts"][0], result["parts"][1][0]))
    assert result["parts"][1][1] == "note"
    assert closure.result["parts"][0].requires_grad  # the closure's own objects are unchanged


def test_adaptive_scales_weights_and_biases_only_on_request():
    model = cases.mlp()
    x, y = cases.vectors()
    F.cross_entropy(model(x), y).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    before = cases.weights_of(model)
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.5, adaptive=True, eta=0.02)
    with opt.perturbed():
        moves = [now - then for now, then in zip(cases.weights_of(model), before, strict=True)]
    scales = [w.abs() + 0.02 if w.dim() > 1 else torch.ones_like(w) for w in before]
    length = oracles.flat([s * g for s, g in zip(scales, grads, strict=True)]).norm()
    expected = [0.5 * s**2 * g / length for s, g in zip(scales, grads, strict=True)]
    torch.testing.assert_close(moves, expected, rtol=1e-9, atol=1e-12)


def test_options_per_parameter_group():
    model = cases.mlp()
    groups = [
        {"params": model[0].parameters(), "rho": 0.4},
        {"params": model[2].parameters(), "perturb": False},
        {"params": model[4].parameters()},
    ]
    opt = sparsesam.SAM(torch.optim.SGD(groups, lr=0.1), model, rho=0.1)
    x, y = cases.vectors()
    F.cross_entropy(model(x), y).backward()
    first, last = (oracles.flat([p.grad for p in model[i].parameters()]) for i in (0, 4))
    before = cases.weights_of(model)
    length = torch.cat([first, last]).norm()
    with opt.perturbed():
        moves = [now - then for now, then in zip(cases.weights_of(model), before, strict=True)]
    torch.testing.assert_close(oracles.flat(moves[:2]), 0.4 * first / length, rtol=1e-9, atol=1e-12)
    assert (oracles.flat(moves[2:4]) == 0).all()
    torch.testing.assert_close(oracles.flat(moves[4:]), 0.1 * last / length, rtol=1e-9, atol=1e-12)


def test_channels_last_weights_are_perturbed_and_restored():
    model = cases.convnet().to(memory_format=torch.channels_last)
    plain = cases.convnet()
    masks = cases.half_masks(model)
    x, y = cases.images()
    for m in (model, plain):
        opt = sparsesam.SSAM(cases.sgd(m), m, rho=0.1, mask=sparsesam.fixed_mask(masks))
        before = cases.weights_of(m)
        F.cross_entropy(m(x), y).backward()
        with opt.perturbed():
            assert not torch.equal(m[0].weight, before[0])
            m.moved = [now - then for now, then in zip(cases.weights_of(m), before, strict=True)]
        assert cases.same_bits(before, cases.weights_of(m))
    torch.testing.assert_close(model.moved, plain.moved)


def test_bfloat16_weights_are_restored_bitwise():
    model = cases.convnet(torch.bfloat16)
    opt = sparsesam.SSAM(cases.sgd(model), model, rho=0.5, mask=sparsesam.random_mask(sparsity=0.5))
    x, y = cases.images(dtype=torch.bfloat16)
    before = cases.weights_of(model)
    F.cross_entropy(model(x), y).backward()
    with opt.perturbed():
        assert not cases.same_bits(before, cases.weights_of(model))
    assert cases.same_bits(before, cases.weights_of(model))
