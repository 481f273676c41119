"""The implicit perturbation against a masked-dense reference: dX = dY · (W ⊙ m)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import sparsesam
from sparsesam.ascent import layers
from tests import cases, oracles


class Reference(nn.Module):
    """y = W x whose input gradient goes through W ⊙ m only; the weight gradient stays dense."""

    def __init__(self, layer, mask):
        super().__init__()
        self.layer, self.mask = layer, mask

    def forward(self, x):
        weight, bias = self.layer.weight, self.layer.bias
        through, around = weight * self.mask, weight - weight * self.mask
        if isinstance(self.layer, nn.Linear):
            return F.linear(x, through) + F.linear(x.detach(), around, bias)
        convolve = self.layer._conv_forward
        return convolve(x, through, None) + convolve(x.detach(), around, bias)


CONVOLUTIONS = [
    {},
    {"stride": 2},
    {"padding": 1},
    {"padding": "same"},
    {"dilation": 2},
    {"groups": 2},
    {"padding": 1, "padding_mode": "circular"},
    {"stride": 2, "padding": 2, "dilation": 2, "groups": 2, "bias": False},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": 1, "stride": (1, 4), "bias": False},
    {"kernel_size": 1, "stride": 2, "padding": 1},
]


def models():
    for options in CONVOLUTIONS:
        yield f"conv2d {options}", lambda o=options: (_conv(nn.Conv2d, 2, o), torch.randn(5, 3, 9, 9))
    yield "conv1d", lambda: (_conv(nn.Conv1d, 1, {"stride": 2, "padding": 1}), torch.randn(5, 3, 9))
    yield "conv3d", lambda: (_conv(nn.Conv3d, 3, {"padding": 1}), torch.randn(3, 3, 5, 5, 5))
    yield (
        "linear",
        lambda: (
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
            torch.randn(7, 6),
        ),
    )
    yield "sequence", lambda: (Sequence(), torch.randn(7, 4, 6))


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x).mean(1)


def _conv(kind, dimensions, options):
    pool = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dimensions - 1]
    options = {"kernel_size": 3, **options}
    return nn.Sequential(
        kind(3, 4, 3), nn.Tanh(), kind(4, 8, **options), nn.Tanh(), pool(1), nn.Flatten(), nn.Linear(8, 3)
    )


def masks_of(model, kind):
    generator = torch.Generator().manual_seed(3)
    masks = {}
    for index, (name, p) in enumerate(model.named_parameters()):
        mask = torch.ones_like(p, dtype=torch.bool)
        if p.dim() > 1:
            if kind == "filters":
                mask = (torch.rand(len(p), generator=generator) < 0.5).view(-1, *[1] * (p.dim() - 1)).expand_as(p)
            elif kind == "columns":
                mask = (
                    (torch.rand(p.shape[1], generator=generator) < 0.5).view(1, -1, *[1] * (p.dim() - 2)).expand_as(p)
                )
            elif kind == "2:4":
                scores = torch.rand(p.shape, generator=generator)
                mask = sparsesam.NM(2, 4).select({name: scores})[name]
            elif kind == "tensor":
                mask = torch.full_like(p, index != 2, dtype=torch.bool)
        masks[name] = mask.clone()
    if not any(mask.any() for mask in masks.values()):
        raise AssertionError
    return masks


def reference_gradients(model, masks, x, y):
    twin = copy.deepcopy(model)
    names = {id(p): name for name, p in twin.named_parameters()}
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "weight") and child.weight.dim() > 1:
                setattr(parent, name, Reference(child, masks[names[id(child.weight)]]))
    F.cross_entropy(twin(x), y).backward()
    grads = {names[id(p)]: p.grad for p in twin.parameters()}
    return {
        name: grads[name] if grads[name] is not None else torch.zeros_like(p) for name, p in model.named_parameters()
    }


@pytest.fixture(params=[layers.LARGE, 2000])
def large(request, monkeypatch):
    """Inputs with more bytes are differentiated a few samples at a time."""
    monkeypatch.setattr(layers, "LARGE", request.param)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(("name", "build"), list(models()), ids=[name for name, _ in models()])
@pytest.mark.parametrize("kind", ["filters", "columns", "2:4", "tensor"])
@pytest.mark.parametrize("ascent", ["implicit", "implicit-dense"])
def test_perturbation_equals_reference(name, build, kind, ascent):
    torch.manual_seed(0)
    model, x = build()
    model, x = model.double(), x.double()
    y = torch.randint(0, 3, (len(x),))
    masks = masks_of(model, kind)
    opt = cases.ssam(model, masks, ascent=ascent)
    opt.refresh_mask(now=True)

    gradient = reference_gradients(model, masks, x, y)
    ones = {n: torch.ones_like(m) for n, m in masks.items()}
    used = masks if ascent == "implicit" else ones
    kept = oracles.flat([gradient[n] * used[n] for n in masks])
    expected = 0.3 * kept / kept.norm()

    before = oracles.flat(cases.weights_of(model))
    opt.zero_grad()
    with opt.first_pass():
        F.cross_entropy(model(x), y).backward()
    with opt.perturbed():
        moved = oracles.flat(cases.weights_of(model)) - before
        F.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(moved, expected, rtol=1e-9, atol=1e-11)

    there = oracles.flat([p.grad for p in model.parameters()])  # the second pass is an ordinary one
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, value in zip(
            twin.parameters(), oracles.unflat(before + moved, list(model.parameters())), strict=True
        ):
            parameter.copy_(value)
    F.cross_entropy(twin(x), y).backward()
    torch.testing.assert_close(there, oracles.flat([p.grad for p in twin.parameters()]), rtol=1e-9, atol=1e-11)


class Calls(TorchDispatchMode):
    """Records which operators are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


#: of dX and dW, how many are computed by convolutions: explicit dX is that of all four filters
@pytest.mark.parametrize(
    ("kernel", "padding", "explicit", "implicit"),
    [((3, 3), (1, 1), 1, 0), ((1, 1), 0, 0, 0), ((3, 2), (2, 0), 1, 0), ((2, 5), "same", 1, 0), ((3, 3), 3, 2, 2)],
)
@pytest.mark.parametrize("ascent", ["explicit", "implicit"])
def test_few_filters_of_large_input_need_no_convolution(kernel, padding, explicit, implicit, ascent, monkeypatch):
    monkeypatch.setattr(layers, "LARGE", 0)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(7, 8), nn.Conv2d(20, 4, kernel, padding=padding), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)
    ).double()
    x, y = torch.randn(5, 20, 6, 7).double(), torch.randint(0, 3, (5,))
    model(x)
    masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    masks["1.weight"][[0, 2, 3]] = False
    opt = cases.ssam(model, masks, ascent=ascent)
    opt.refresh_mask(now=True)
    if ascent == "implicit":
        expected = reference_gradients(model, masks, x, y)
    else:
        expected = dict(zip(masks, torch.autograd.grad(F.cross_entropy(model(x), y), model.parameters()), strict=True))
    with opt.first_pass(), Calls() as calls:
        F.cross_entropy(model(x), y).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad * masks[name], expected[name] * masks[name], rtol=1e-11, atol=1e-13)
    by_sample = len(x) * (explicit if ascent == "explicit" else implicit)
    assert calls.names.count("convolution_backward") == by_sample


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (1, 2)])
def test_other_gradients_through_some_filters_are_unchanged(kernel, stride, monkeypatch):
    """Second derivatives, as for a penalty, and batched ones, as for a Jacobian."""
    monkeypatch.setattr(layers, "LARGE", 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(20, 4, kernel, stride), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)).double()
    x = torch.randn(5, 20, 6, 7, dtype=torch.float64, requires_grad=True)
    model(x)
    masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    masks["0.weight"][[0, 2, 3]] = False
    opt = cases.ssam(model, masks)
    opt.refresh_mask(now=True)
    inputs = (x, *model.parameters())

    def gradients():
        y = model(x)
        once = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
        twice = torch.autograd.grad(sum(one.square().sum() for one in once), inputs, retain_graph=True)
        of_each = torch.stack([torch.full_like(y, factor) for factor in range(3)])
        return *once, *twice, *torch.autograd.grad(y, inputs, of_each, is_grads_batched=True)

    expected = gradients()
    with opt.first_pass():
        found = gradients()
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_full_mask_makes_implicit_equal_explicit():
    results = []
    for ascent in ("explicit", "implicit"):
        model = cases.mlp()
        opt = cases.ssam(model, "*", ascent=ascent)
        for seed in range(3):
            opt.step(cases.closure_for(model, opt, *cases.vectors(seed=seed)))
        results.append(cases.weights_of(model))
    assert cases.same_bits(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model = cases.convnet()
    opt = cases.ssam(model, sparsesam.random_mask(sparsity=0.5, pattern="filter"), rho=0.05, ascent="implicit")
    x, y = cases.images()

    def loss_of():
        with torch.autocast("cpu", dtype=dtype):
            return F.cross_entropy(model(x), y)

    losses = [cases.take_step(opt, loss_of).item() for _ in range(8)]
    assert losses[-1] < losses[0]


def test_implicit_needs_masked_norm_and_engine():
    model = cases.mlp()
    rule = sparsesam.random_mask(sparsity=0.5, pattern="filter")
    with pytest.raises(ValueError, match='norm must be "masked"'):
        sparsesam.SSAM(cases.sgd(model), model, mask=rule, ascent="implicit")
    opt = sparsesam.SSAM(cases.sgd(model), model, mask=rule, norm="masked", ascent="implicit", engine=False)
    with pytest.raises(ValueError, match="needs the engine"):
        opt.step(cases.closure_for(model, opt, *cases.vectors()))
    with pytest.raises(ValueError, match="ascent must be one of"):
        sparsesam.SSAM(cases.sgd(model), model, mask=rule, ascent="best")
