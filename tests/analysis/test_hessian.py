import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsesam.analysis import (
    Hessian,
    Objective,
    hessian_diagonal,
    hessian_eigenvalues,
    hessian_trace,
    spectral_density,
)
from sparsesam.analysis.lanczos import lanczos, top_eigenpairs
from tests.analysis.oracles import dense_hessian
from tests.cases import convnet, images, mlp, vectors


def batches():
    return [vectors(12), vectors(5, seed=2)]


def matrix_with(values, seed=0):
    random = np.random.default_rng(seed).standard_normal((len(values), len(values)))
    q, _ = np.linalg.qr(random)
    return torch.from_numpy(q @ np.diag(values) @ q.T)


@pytest.mark.parametrize("keep_graph", [False, True])
def test_products_are_those_of_the_dense_matrix(keep_graph):
    model = mlp()
    dense = dense_hessian(model, batches())
    hessian = Hessian(Objective(model, batches(), F.cross_entropy), keep_graph=keep_graph)
    v = torch.randn(hessian.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with hessian.measuring():
        for _ in range(2):
            assert np.allclose((hessian @ v).numpy(), dense @ v.numpy(), atol=1e-12)
    assert hessian.products == 2
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
def test_eigenvalues_and_vectors_are_those_of_the_dense_matrix(which):
    model = mlp()
    dense = dense_hessian(model, batches())
    values = np.linalg.eigvalsh(dense)
    order = {"largest": -values, "smallest": values, "magnitude": -np.abs(values)}[which]
    found = hessian_eigenvalues(Objective(model, batches(), F.cross_entropy), 5, which=which, tolerance=1e-9)
    assert found.converged
    assert np.allclose(found.eigenvalues, values[np.argsort(order)][:5], rtol=1e-8)
    for value, vector in zip(found.eigenvalues, found.vectors, strict=True):
        v = torch.cat([part.reshape(-1) for part in vector.values()]).numpy()
        assert np.allclose(dense @ v, value * v, atol=1e-4)
        assert np.linalg.norm(v) == pytest.approx(1)
    if which == "largest":
        assert found.ratio == pytest.approx(values[-1] / values[-5])


@pytest.mark.parametrize("seed", range(4))
def test_error_estimates_cover_the_errors_at_the_asked_tolerance(seed):
    model = mlp(seed=seed)
    values = np.linalg.eigvalsh(dense_hessian(model, batches()))[::-1][:5]
    found = hessian_eigenvalues(Objective(model, batches(), F.cross_entropy), 5, tolerance=1e-3, seed=seed)
    assert np.all(np.abs(found.eigenvalues - values) <= 1e-3 * values)
    assert found.products < 60


def test_restarts_change_the_cost_not_the_result():
    matrix = matrix_with(np.concatenate([np.linspace(-1, 1, 195), [2, 2.5, 3, 4, 8]]))
    start = torch.randn(200, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for most in (200, 14):
        pairs = top_eigenpairs(lambda v: matrix @ v.double(), start, 5, which="largest", tolerance=1e-8, max_basis=most)
        assert np.allclose(pairs.values, [8, 4, 3, 2.5, 2], rtol=1e-7)


def test_repeated_and_few_distinct_eigenvalues_do_not_hang():
    matrix = torch.diag(torch.tensor([3.0, 3, 3, 1, 1, 1, 1, 1], dtype=torch.float64))
    start = torch.ones(8, dtype=torch.float64)
    pairs = top_eigenpairs(lambda v: matrix @ v, start, 5, which="largest", tolerance=1e-6)
    assert np.allclose(pairs.values[0], 3)
    zero = top_eigenpairs(lambda v: 0 * v, start, 3, which="largest", tolerance=1e-6)
    assert np.allclose(zero.values, 0)


def test_products_beyond_the_limit_are_reported_as_not_converged():
    found = hessian_eigenvalues(Objective(mlp(), batches(), F.cross_entropy), 5, tolerance=1e-12, max_products=6)
    assert not found.converged
    assert found.products == 6
    assert "max_products" in found.notes[-1]


def test_restriction_to_a_layer_is_the_matrix_diagonal_block():
    model = mlp()
    dense = dense_hessian(model, batches(), names=("2.weight", "2.bias"))
    found = hessian_eigenvalues(Objective(model, batches(), F.cross_entropy), 3, parameters="2.*", tolerance=1e-9)
    assert np.allclose(found.eigenvalues, np.linalg.eigvalsh(dense)[::-1][:3])
    assert found.parameters == ["2.weight", "2.bias"]


def test_unused_parameters_are_zero_rows_and_frozen_ones_are_left_out():
    model = nn.ModuleDict({"used": mlp(), "idle": nn.Linear(4, 4).double()})
    model["used"][0].requires_grad_(False)
    objective = Objective(model, batches(), model_loss=lambda m, b: F.cross_entropy(m["used"](b[0]), b[1]))
    hessian = Hessian(objective)
    assert not any(name.startswith("used.0") for name in hessian.parameters)
    with hessian.measuring():
        product = hessian.named(hessian @ torch.ones(hessian.size, dtype=torch.float64))
    assert not product["idle.weight"].any()
    assert product["used.4.weight"].any()
    assert "idle.weight" in hessian.notes[0]
    assert model["used"][0].weight.requires_grad is False


def test_kinks_are_noted_for_layers_and_functions_alike():
    smooth = hessian_trace(Objective(mlp(), batches(), F.cross_entropy), probes=2)
    kinked = hessian_trace(Objective(convnet(), [images(4)], F.cross_entropy), probes=2)
    assert smooth.notes == []
    assert "Relu" in kinked.notes[0]


def test_linear_loss_has_the_zero_hessian():
    model = nn.Linear(6, 1).double()
    objective = Objective(model, [vectors(4)], model_loss=lambda m, b: m(b[0]).mean())
    assert hessian_trace(objective, probes=3).trace == 0
    assert np.allclose(hessian_eigenvalues(objective, 2).eigenvalues, 0)


def test_attention_has_second_derivatives():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True).double()
    x, _ = vectors(8)
    objective = Objective(model, [(x.view(2, 4, 6),)], model_loss=lambda m, b: m(b[0]).square().sin().mean())
    assert hessian_eigenvalues(objective, 1).converged


def test_trace_is_within_its_error_estimate():
    model = mlp()
    true = np.trace(dense_hessian(model, batches()))
    found = hessian_trace(Objective(model, batches(), F.cross_entropy), probes=200)
    assert abs(found.trace - true) < 4 * found.standard_error
    assert found.standard_error < 0.2 * true
    early = hessian_trace(Objective(model, batches(), F.cross_entropy), probes=200, tolerance=0.5)
    assert early.products < 200


def test_lanczos_quadrature_is_exact_for_moments_of_the_start_vector():
    matrix = matrix_with(np.linspace(-2, 5, 40))
    v = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    v /= v.norm()
    values, vectors_ = np.linalg.eigh(lanczos(lambda x: matrix @ x, v, 6))
    for power in range(12):
        exact = (v @ torch.linalg.matrix_power(matrix, power) @ v).item()
        assert float(vectors_[0] ** 2 @ values**power) == pytest.approx(exact, rel=1e-9)


def test_full_lanczos_finds_every_eigenvalue_without_ghosts():
    true = np.concatenate([np.zeros(1), np.geomspace(1e-3, 1e3, 59)])
    matrix = matrix_with(true)
    found = np.linalg.eigvalsh(lanczos(lambda x: matrix @ x, torch.ones(60, dtype=torch.float64), 60))
    assert np.allclose(found, true, atol=1e-8)


def test_density_integrates_to_one_and_has_the_matrix_moments():
    model = mlp()
    dense = dense_hessian(model, batches())
    found = spectral_density(Objective(model, batches(), F.cross_entropy), steps=40, probes=30)
    assert np.trapezoid(found.density, found.grid) == pytest.approx(1, rel=1e-3)
    assert all(shares.sum() == pytest.approx(1) for shares in found.shares)
    assert found.moment(2) == pytest.approx(np.trace(dense @ dense) / len(dense), rel=0.3)
    values = np.linalg.eigvalsh(dense)
    assert max(n.max() for n in found.nodes) == pytest.approx(values[-1], rel=1e-6)
    assert json.dumps(found.to_dict(), allow_nan=False)


def test_density_of_few_distinct_eigenvalues_ends_early_and_is_exact():
    model = nn.Linear(2, 2, bias=False).double()
    objective = Objective(model, [(torch.eye(2).double(),)], model_loss=lambda m, b: m.weight.square().sum() * 3)
    found = spectral_density(objective, steps=20, probes=2)
    assert [n.tolist() for n in found.nodes] == [[pytest.approx(6.0)]] * 2
    assert found.products == 2


def test_diagonal_exact_and_estimated():
    model = mlp()
    true = np.diag(dense_hessian(model, batches()))
    objective = Objective(model, batches(), F.cross_entropy)
    assert np.allclose(hessian_diagonal(Hessian(objective)), true, atol=1e-12)
    estimate = hessian_diagonal(Hessian(objective), probes=400)
    assert np.corrcoef(estimate, true)[0, 1] > 0.9


def test_single_precision_agrees_with_double():
    values = [
        hessian_eigenvalues(
            Objective(convnet(dtype), [images(16, dtype)], F.cross_entropy), 3, tolerance=1e-4
        ).eigenvalues
        for dtype in (torch.float32, torch.float64)
    ]
    assert np.allclose(*values, rtol=1e-3)


def test_wrong_counts_are_named():
    objective = Objective(mlp(), batches(), F.cross_entropy)
    with pytest.raises(ValueError, match="count"):
        hessian_eigenvalues(objective, 0)
    with pytest.raises(ValueError, match="probes"):
        hessian_trace(objective, probes=1)
    with pytest.raises(ValueError, match="width"):
        spectral_density(objective, width=0.0)
