import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsesam.analysis import (
    HessianOperator,
    Objective,
    hessian_diagonal,
    hessian_eigenvalues,
    hessian_trace,
    spectral_density,
)
from tests.analysis.oracles import batches, dense_hessian, objective_of
from tests.cases import mlp, vectors

# ---- products


@pytest.mark.parametrize("names", [None, ["2.weight", "2.bias"]])
@pytest.mark.parametrize("keep_graph", [False, True])
def test_products_match_dense_matrix_of_every_or_some_parameters(keep_graph, names):
    model = mlp()
    dense = dense_hessian(model, batches(), names)
    hessian = HessianOperator(objective_of(model), parameters=names, keep_graph=keep_graph)
    assert hessian.measured()["parameters"] == (names or list(dict(model.named_parameters())))
    v = torch.randn(hessian.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with hessian.measuring():
        for _ in range(2):
            assert np.allclose((hessian @ v).numpy(), dense @ v.numpy(), atol=1e-12)
    assert hessian.products == 2


def test_unused_parameters_are_zero_rows_and_frozen_ones_excluded():
    model = nn.ModuleDict({"used": mlp(), "idle": nn.Linear(4, 4).double()})
    model["used"][0].requires_grad_(False)
    objective = Objective(model, batches(), model_loss=lambda m, b: F.cross_entropy(m["used"](b[0]), b[1]))
    hessian = HessianOperator(objective)
    assert not any(name.startswith("used.0") for name in hessian.parameters)
    with hessian.measuring():
        parts = hessian.split(hessian @ torch.ones(hessian.size, dtype=torch.float64))
    product = dict(zip(hessian.parameters, parts, strict=True))
    assert not product["idle.weight"].any()
    assert product["used.4.weight"].any()
    assert model["used"][0].weight.requires_grad is False


def test_attention_has_second_derivatives():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True).double()
    x, _ = vectors(8)
    objective = Objective(model, [(x.view(2, 4, 6),)], model_loss=lambda m, b: m(b[0]).square().sin().mean())
    assert hessian_eigenvalues(objective, 1).converged


def test_infinite_product_raises():
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    objective = Objective(model, [torch.ones(1, 1)], model_loss=lambda m, b: m.weight.abs().pow(1.5).sum())
    with pytest.raises(ValueError, match="product is not finite"):
        hessian_trace(objective, probes=2)


# ---- eigenvalues


def test_eigenpairs_match_dense_matrix():
    model = mlp()
    dense = dense_hessian(model, batches())
    values = np.linalg.eigvalsh(dense)
    found = hessian_eigenvalues(objective_of(model), 5, tolerance=1e-9)
    assert found.converged
    assert np.allclose(found.eigenvalues, values[::-1][:5], rtol=1e-8)
    for value, vector in zip(found.eigenvalues, found.vectors, strict=True):
        v = torch.cat([part.reshape(-1) for part in vector.values()]).numpy()
        assert np.allclose(dense @ v, value * v, atol=1e-4)
        assert np.linalg.norm(v) == pytest.approx(1)
    assert found.ratio == pytest.approx(values[-1] / values[-5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(2))
def test_errors_are_within_tolerance_and_bounds(seed, dtype):
    values = np.linalg.eigvalsh(dense_hessian(mlp(seed=seed), batches()))[::-1][:5]
    objective = Objective(mlp(seed=seed).to(dtype), [(x.to(dtype), y) for x, y in batches()], F.cross_entropy)
    found = hessian_eigenvalues(objective, 5, tolerance=1e-3, seed=seed)
    assert np.all(np.abs(found.eigenvalues - values) <= np.minimum(found.error_bounds + 1e-5 * values, 1e-3 * values))
    assert found.products < 60


def test_exceeding_product_limit_reports_no_convergence():
    found = hessian_eigenvalues(objective_of(mlp()), 5, tolerance=1e-12, max_products=6)
    assert not found.converged
    assert found.products == 6
    assert "max_products" in found.notes[-1]
    fewer = hessian_eigenvalues(objective_of(mlp()), 5, max_products=3)
    assert (len(fewer.eigenvalues), fewer.ratio, fewer.converged) == (3, None, False)


# ---- trace, density, diagonal


def test_trace_is_within_error_estimate():
    model = mlp()
    true = np.trace(dense_hessian(model, batches()))
    found = hessian_trace(objective_of(model), probes=200)
    assert abs(found.trace - true) < 4 * found.standard_error
    assert found.standard_error < 0.2 * true
    early = hessian_trace(objective_of(model), probes=200, tolerance=0.5)
    assert 10 <= early.products < 200


def test_density_integrates_to_one_and_reaches_largest_eigenvalue():
    model = mlp()
    dense = dense_hessian(model, batches())
    found = spectral_density(objective_of(model), steps=40, probes=4)
    assert np.trapezoid(found.density, found.grid) == pytest.approx(1, rel=1e-3)
    assert max(n.max() for n in found.nodes) == pytest.approx(np.linalg.eigvalsh(dense)[-1], rel=1e-6)
    assert json.dumps(found.to_dict(), allow_nan=False)


def test_quadrature_is_exact_for_moments_of_start_vector():
    model = mlp()
    hessian, dense = HessianOperator(objective_of(model)), dense_hessian(model, batches())
    found = spectral_density(hessian, steps=6, probes=1)
    start = hessian.random_normal(torch.Generator().manual_seed(0)).numpy()
    v = start / np.linalg.norm(start)
    for power in range(12):
        moment = v @ np.linalg.matrix_power(dense, power) @ v
        assert found.shares[0] @ found.nodes[0] ** power == pytest.approx(moment, rel=1e-9)


@pytest.mark.parametrize("value", [6.0, 0.0])
def test_multiple_eigenvalue(value):
    model = nn.Linear(2, 2, bias=False).double()
    objective = Objective(model, [torch.zeros(1)], model_loss=lambda m, b: m.weight.square().sum() * value / 2)
    found = spectral_density(objective, steps=20, probes=2)
    assert [n.tolist() for n in found.nodes] == [[pytest.approx(value)]] * 2  # exact, and stopped early
    assert found.products == 2
    largest = hessian_eigenvalues(objective, 3, tolerance=1e-6)  # the space is continued with random vectors
    assert (largest.eigenvalues.tolist(), largest.converged) == (pytest.approx([value] * 3), True)


def test_exact_and_estimated_diagonal():
    model = mlp()
    true = np.diag(dense_hessian(model, batches()))
    assert np.allclose(hessian_diagonal(objective_of(model)), true, atol=1e-12)
    estimate = hessian_diagonal(objective_of(model), probes=400)
    assert np.corrcoef(estimate, true)[0, 1] > 0.9
