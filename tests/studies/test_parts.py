"""Methods composed of parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from studies.parts import PARTS

import sparsesam
from sparsesam.lab.models import build_model


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
    base = torch.optim.SGD(network.parameters(), lr=0.1)
    opt = sparsesam.SSAM(base, network, mask=sparsesam.random_mask(sparsity=0.5))
    training = SimpleNamespace(module=network, optimizer=opt, config=SimpleNamespace(model=model, rho=0.3))
    PARTS[part](training)
    x, y = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    before = {name: parameter.clone() for name, parameter in network.named_parameters()}
    with training.optimizer.first_pass():
        F.cross_entropy(network(x), y).backward()
    with training.optimizer.perturbed():
        moved = {name: (parameter - before[name]).detach() for name, parameter in network.named_parameters()}
    assert {name.split(".")[0] for name, change in moved.items() if change.any()} == modules
    assert torch.cat([change.flatten() for change in moved.values()]).norm() == pytest.approx(0.3, rel=1e-4)
