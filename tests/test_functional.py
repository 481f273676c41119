"""The functional form against the naive oracle."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.func import functional_call, vmap
from torch.nn import functional as F

from sparsesam.functional import perturbation, sharpness_aware_grad
from tests import cases, oracles


def loss_of(model):
    return lambda params, x, y: F.cross_entropy(functional_call(model, params, (x,)), y)


@pytest.mark.parametrize("norm", ["full", "masked"])
@pytest.mark.parametrize("masked", [False, True])
def test_gradient_equals_oracle(masked, norm):
    model = cases.mlp()
    twin = copy.deepcopy(model)
    masks = cases.half_masks(model) if masked else None
    x, y = cases.vectors()
    params = {name: p.detach() for name, p in model.named_parameters()}
    gradients, loss = sharpness_aware_grad(loss_of(model), rho=0.3, masks=masks, norm=norm)(params, x, y)
    base = torch.optim.SGD(twin.parameters(), lr=1.0)
    given = None if masks is None else list(masks.values())
    value = oracles.ssam_step(twin, base, lambda m: F.cross_entropy(m(x), y), rho=0.3, masks=given, norm=norm)
    stepped = [params[name] - gradient for name, gradient in gradients.items()]
    torch.testing.assert_close(stepped, cases.weights_of(twin), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(loss, value)


def test_vmap_over_models():
    models = [cases.mlp(seed=seed) for seed in range(3)]
    x, y = cases.vectors()
    params, _ = torch.func.stack_module_state(models)
    params = {name: p.detach() for name, p in params.items()}
    gradient = sharpness_aware_grad(loss_of(models[0]), rho=0.3)
    together, losses = vmap(gradient, in_dims=(0, None, None))(params, x, y)
    for number in range(3):
        alone, loss = gradient({name: p[number] for name, p in params.items()}, x, y)
        torch.testing.assert_close({name: g[number] for name, g in together.items()}, alone)
        torch.testing.assert_close(losses[number], loss)


def test_zero_gradient_and_bad_input():
    assert torch.equal(perturbation({"w": torch.zeros(3)}, rho=0.1)["w"], torch.zeros(3))
    for options, words in (
        ({"norm": "l1"}, "norm must be one of 'full', 'masked', got 'l1'"),
        ({"rho": -1}, "rho must be at least 0, got -1"),
        ({"masks": {"v": torch.ones(2)}}, "masks has 'v', which is not a parameter"),
    ):
        with pytest.raises(ValueError, match=words):
            perturbation({"w": torch.ones(2)}, **{"rho": 0.1, **options})
