"""The implicit perturbation of whole models against a masked-dense reference: dX = dY · (W ⊙ m)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import cases, oracles
from tests.test_filters import mask_of


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


def convolutional(kind, pool, **options):
    return nn.Sequential(
        kind(3, 4, 3), nn.Tanh(), kind(4, 8, 3, **options), nn.Tanh(), pool(1), nn.Flatten(), nn.Linear(8, 3)
    )


MODELS = {
    "conv1d": lambda: (convolutional(nn.Conv1d, nn.AdaptiveAvgPool1d, stride=2), torch.randn(5, 3, 9)),
    "conv2d": lambda: (convolutional(nn.Conv2d, nn.AdaptiveAvgPool2d, padding="same"), torch.randn(5, 3, 9, 9)),
    "groups": lambda: (convolutional(nn.Conv2d, nn.AdaptiveAvgPool2d, groups=2), torch.randn(5, 3, 9, 9)),
    "linear": lambda: (cases.mlp(), torch.randn(7, 6)),
}


def masks_of(model, kind):
    """Masks of the kind for weights; "tensor" leaves out one of them."""
    of_weights = "all" if kind == "tensor" else kind
    masks = {name: mask_of(p, of_weights if p.dim() > 1 else "all") for name, p in model.named_parameters()}
    if kind == "tensor":
        masks["2.weight"][:] = False
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


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["filters", "2:4", "tensor"])
@pytest.mark.parametrize("ascent", ["implicit", "implicit-dense"])
def test_perturbation_equals_reference(name, kind, ascent):
    torch.manual_seed(0)
    model, x = MODELS[name]()
    model, x = model.double(), x.double()
    y = torch.randint(0, 3, (len(x),))
    masks = masks_of(model, kind)
    opt = cases.ssam(model, masks, ascent=ascent)
    opt.refresh_mask(now=True)

    gradient = reference_gradients(model, masks, x, y)
    kept = oracles.flat([gradient[n] * (m if ascent == "implicit" else 1) for n, m in masks.items()])
    expected = 0.3 * kept / kept.norm()

    before = oracles.flat(cases.weights_of(model))
    opt.zero_grad()
    with opt.first_pass():
        opt.backward(F.cross_entropy(model(x), y))
    with opt.perturbed():
        moved = oracles.flat(cases.weights_of(model)) - before
        twin = copy.deepcopy(model)
        F.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(moved, expected, rtol=1e-9, atol=1e-11)
    twin.zero_grad()
    F.cross_entropy(twin(x), y).backward()  # the second pass is an ordinary one
    there, ordinary = (oracles.flat([p.grad for p in one.parameters()]) for one in (model, twin))
    torch.testing.assert_close(there, ordinary, rtol=1e-9, atol=1e-11)


def test_full_mask_makes_implicit_equal_explicit():
    results = []
    for ascent in ("explicit", "implicit"):
        model = cases.mlp()
        opt = cases.ssam(model, "*", ascent=ascent)
        cases.train(model, opt, range(3), step=cases.by_minimize)
        results.append(cases.weights_of(model))
    assert cases.same_bits(*results)
