"""Methods composed of parts, compared with the formulas of their papers."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from studies.parts import DrawnLayers, draw_layers, hardest_first, look_sam
from tests import cases

import sparsesam
from sparsesam.masks.scores import ScoreContext

LR, RHO = 0.1, 0.3


def make(optimizer=sparsesam.SAM, **options):
    model = cases.mlp()  # float64
    base = torch.optim.SGD(model.parameters(), lr=LR)
    config = SimpleNamespace(sparsity=0.5, rho=RHO, seed=0)
    return SimpleNamespace(module=model, optimizer=optimizer(base, model, RHO, **options), config=config)


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


def sam_gradient(weights, ascent_batch, batch):
    g = gradient_at(weights, ascent_batch)
    return gradient_at([w + RHO * d / norm(g) for w, d in zip(weights, g, strict=True)], batch)


def test_k_sam_ascends_by_samples_of_largest_loss():
    training = make(ascent_fraction=0.25)
    hardest_first(training)
    weights = cases.weights_of(training.module)
    for seed in range(3):
        x, y = batch = cases.vectors(12, seed=seed)
        model = cases.mlp()
        model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
        losses = [F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).item() for i in range(12)]
        hardest = sorted(range(12), key=lambda i: -losses[i])[:3]
        s = sam_gradient(weights, (x[hardest], y[hardest]), batch)
        weights = [w - LR * d for w, d in zip(weights, s, strict=True)]
        step(training, batch)
        torch.testing.assert_close(cases.weights_of(training.module), weights, rtol=1e-12, atol=1e-12)
    assert training.module.training


def test_look_sam_adds_last_orthogonal_part():
    training = make(every=3)
    look_sam(training, alpha=0.7)
    weights, v = cases.weights_of(training.module), None
    for number in range(7):
        batch = cases.vectors(12, seed=number)
        g = gradient_at(weights, batch)
        if number % 3 == 0:
            used = sam_gradient(weights, batch, batch)
            along = sum((a * b).sum() for a, b in zip(used, g, strict=True)) / norm(g) ** 2
            v = [a - along * b for a, b in zip(used, g, strict=True)]
        else:
            used = [a + 0.7 * norm(g) / norm(v) * b for a, b in zip(g, v, strict=True)]
        weights = [w - LR * d for w, d in zip(weights, used, strict=True)]
        step(training, batch)
        torch.testing.assert_close(cases.weights_of(training.module), weights, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("by_norm", [True, False])
def test_layers_are_drawn_in_proportion_to_gradient_norm(by_norm):
    lengths = {"a": 1.0, "b": 2.0, "c": 5.0}
    parameters = {f"{name}.{kind}": torch.zeros(4) for name in lengths for kind in ("weight", "bias")}
    gradients = {key: torch.full((4,), lengths[key[0]] / 8**0.5) for key in parameters}
    context = ScoreContext(torch.nn.Identity(), parameters, torch.Generator().manual_seed(0), 0, directions=gradients)
    drawn = Counter()
    for _ in range(2000):
        masks = DrawnLayers(1 / 3, by_norm).make(context)
        assert all(masks[f"{name}.weight"].all() == masks[f"{name}.bias"].all() for name in lengths)
        drawn.update(name for name in lengths if masks[f"{name}.weight"].all())
    for name, length in lengths.items():
        expected = length / 8 if by_norm else 1 / 3
        assert drawn[name] / 2000 == pytest.approx(expected, abs=0.04)  # 3.6 standard deviations


@pytest.mark.parametrize("descends", [False, True])
def test_drawn_layers_are_perturbed_and_with_descends_alone_updated(descends):
    training = make(sparsesam.SSAM, mask=sparsesam.random_mask(sparsity=0.5))
    draw_layers(training, descends=descends)
    seen = set()
    for seed in range(6):
        before = cases.weights_of(training.module)
        step(training, cases.vectors(12, seed=seed))
        masks = training.optimizer.masks
        drawn = {name for name, mask in masks.items() if mask.all()}
        assert all(mask.all() or not mask.any() for mask in masks.values())
        assert 0 < len(drawn) < len(masks)
        seen.add(frozenset(drawn))
        moved = {
            name for (name, w), old in zip(training.module.named_parameters(), before, strict=True) if (w != old).any()
        }
        assert moved == (drawn if descends else set(masks))
    assert len(seen) > 1
