import json

import numpy as np
import pytest
import torch
from torch import nn

from sparsesam.analysis import Objective, compare_gradients, gradient_difference
from tests.analysis.oracles import batches, mean_loss, objective_of
from tests.cases import half_masks, mlp, same_bits, weights_of
from tests.oracles import flat, perturbation, unflat


def naive_ratios(model, rho):
    parameters = list(model.parameters())
    plain = flat(torch.autograd.grad(mean_loss(model, batches()), parameters))
    weight = flat([p.detach() for p in parameters])
    moved = weight + perturbation(plain, weight, torch.ones_like(weight), rho=rho)
    with torch.no_grad():
        for p, value in zip(parameters, unflat(moved, parameters), strict=True):
            p.copy_(value)
    return ((flat(torch.autograd.grad(mean_loss(model, batches()), parameters)) - plain) / plain).abs()


def test_share_quantiles_and_histogram_match_definition():
    model = mlp()
    before = weights_of(model)
    found = gradient_difference(objective_of(model), 0.5)
    assert same_bits(model.parameters(), before)
    r = naive_ratios(mlp(), 0.5).log10().numpy()
    assert found.every.share_below_zero == pytest.approx((r < 0).mean())
    assert found.every.quantiles["0.5"] == pytest.approx(np.median(r), rel=1e-9)
    assert np.array_equal(found.every.histogram, np.histogram(r, found.edges)[0])
    assert sum(layer.weights for layer in found.layers.values()) == len(r) == found.every.weights
    assert json.dumps(found.to_dict(), allow_nan=False)


def test_inside_and_outside_of_mask_add_up():
    model = mlp()
    found = gradient_difference(objective_of(model), 0.5, masks=half_masks(model))
    assert np.array_equal(found.inside.histogram + found.outside.histogram, found.every.histogram)
    assert found.inside.weights == sum(int(mask.sum()) for mask in half_masks(model).values())


def test_zero_equal_and_non_finite_gradients_are_counted_separately():
    plain = {"w": torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, float("nan")])}
    perturbed = {"w": torch.tensor([0.0, 2.0, 1.0, 1.1, 3.0, 1.0])}
    every = compare_gradients(plain, perturbed).every
    assert (every.both_zero, every.from_zero, every.equal, every.not_finite) == (1, 1, 1, 1)
    assert every.histogram.sum() == 2
    assert every.share_below_zero == pytest.approx(2 / 4)


def test_zero_gradient_raises():
    model = nn.Linear(2, 2)
    objective = Objective(model, [torch.ones(1, 2)], model_loss=lambda m, b: 0 * m(b).sum())
    with pytest.raises(ValueError, match="no direction"):
        gradient_difference(objective)
