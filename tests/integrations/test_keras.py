"""The recipe of docs/keras.md takes SAM's steps; runs where keras is installed."""

from __future__ import annotations

import os

import pytest
import torch

import sparsesam
from tests import cases
from tests.docs import pages

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")
if keras.backend.backend() != "torch":
    pytest.skip("keras runs on another backend here", allow_module_level=True)

X, Y = cases.vectors(dtype=torch.float32)


def recipe():
    keras.utils.set_random_seed(0)
    return pages.run("docs/keras.md", 0, torch=torch, sparsesam=sparsesam, x=X, y=Y)


def step_of(model, opt):
    model.sharpness_aware = opt
    model.train_step((X, Y))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_step_uses_perturbed_gradient_one_dropout_mask_and_one_statistics_update():
    model = recipe()["model"]
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    def gradients(at):
        model.load_state_dict({**start, **at})
        torch.manual_seed(5)  # of dropout
        loss = torch.nn.functional.cross_entropy(model(X, training=True), Y)
        return dict(zip(at, torch.autograd.grad(loss, [p for _, p in trained]), strict=True))

    first = gradients({name: start[name] for name, _ in trained})
    averages = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    norm = torch.cat([g.flatten() for g in first.values()]).norm()
    second = gradients({name: start[name] + 0.3 * g / norm for name, g in first.items()})
    model.load_state_dict(start)
    torch.manual_seed(5)
    base = torch.optim.SGD([p for _, p in trained], lr=0.1)
    reached = step_of(model, sparsesam.SAM(base, model, rho=0.3))
    for name, _ in trained:
        torch.testing.assert_close(reached[name], start[name] - 0.1 * second[name], rtol=1e-5, atol=1e-6)
    for name, value in averages.items():
        torch.testing.assert_close(reached[name], value)


def test_fit_trains():
    history = recipe()["history"].history
    assert len(history["loss"]) == 2
    assert history["loss"][1] < history["loss"][0]
