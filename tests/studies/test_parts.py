"""Methods composed of parts, compared with the formulas of their papers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from studies.parts import PARTS
from tests import cases

import sparsesam
from sparsesam.lab.models import build_model

LR, RHO = 0.1, 0.3


def make(optimizer=sparsesam.SAM, **options):
    model = cases.mlp()  # float64
    base = torch.optim.SGD(model.parameters(), lr=LR)
    return SimpleNamespace(module=model, optimizer=optimizer(base, model, RHO, **options))


def step(training, batch):
    def closure(part):
        training.optimizer.zero_grad()
        loss = F.cross_entropy(training.module(part[0]), part[1])
        loss.backward()
        return loss

    return training.optimizer.step(closure, batch=batch)


def gradient_at(weights, batch):
    model = cases.mlp()
    model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
    return torch.autograd.grad(F.cross_entropy(model(batch[0]), batch[1]), list(model.parameters()))


def norm(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors]).norm()


def sam_gradient(weights, batch):
    g = gradient_at(weights, batch)
    return gradient_at([w + RHO * d / norm(g) for w, d in zip(weights, g, strict=True)], batch)


@pytest.mark.parametrize(
    ("part", "model", "modules"),
    [
        ("classifier", "small-cnn", {"12"}),
        ("last-stage", "small-cnn", {"7", "8", "12"}),
        ("all-but-first", "small-cnn", {"3", "4", "7", "8", "12"}),
        ("classifier", "resnet10-small", {"fc"}),
        ("last-stage", "resnet10-small", {"layer4", "fc"}),
        ("all-but-first", "resnet10-small", {"layer1", "layer2", "layer3", "layer4", "fc"}),
    ],
)
def test_cheap_masks_perturb_whole_layers_by_rho(part, model, modules):
    network = build_model(model, 10, 3, 8)
    opt = sparsesam.SSAM(
        torch.optim.SGD(network.parameters(), lr=LR), network, mask=sparsesam.random_mask(sparsity=0.5)
    )
    config = SimpleNamespace(model=model, rho=RHO)
    training = SimpleNamespace(module=network, optimizer=opt, config=config)
    PARTS[part](training)
    x, y = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    before = {name: parameter.clone() for name, parameter in network.named_parameters()}
    with training.optimizer.first_pass():
        F.cross_entropy(network(x), y).backward()
    with training.optimizer.perturbed():
        moved = {name: (parameter - before[name]).detach() for name, parameter in network.named_parameters()}
    assert {name.split(".")[0] for name, change in moved.items() if change.any()} == modules
    assert norm(moved.values()) == pytest.approx(RHO, rel=1e-4)
