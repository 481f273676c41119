import numpy as np
import pytest
import torch

from sparsesam.analysis.lanczos import lanczos, top_eigenpairs


def matrix_with(values, seed=0):
    random = np.random.default_rng(seed).standard_normal((len(values), len(values)))
    q, _ = np.linalg.qr(random)
    return torch.from_numpy(q @ np.diag(values) @ q.T)


def test_restarts_change_cost_not_result():
    matrix = matrix_with(np.concatenate([np.linspace(-1, 1, 195), [2, 2.5, 3, 4, 8]]))
    start = torch.randn(200, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for most in (200, 14):
        pairs = top_eigenpairs(lambda v: matrix @ v.double(), start, 5, tolerance=1e-8, max_basis=most)
        assert np.allclose(pairs.values, [8, 4, 3, 2.5, 2], rtol=1e-7)


def test_repeated_and_few_distinct_eigenvalues_terminate():
    matrix = torch.diag(torch.tensor([3.0, 3, 3, 1, 1, 1, 1, 1], dtype=torch.float64))
    start = torch.ones(8, dtype=torch.float64)
    pairs = top_eigenpairs(lambda v: matrix @ v, start, 5, tolerance=1e-6)
    assert np.allclose(pairs.values[0], 3)
    zero = top_eigenpairs(lambda v: 0 * v, start, 3, tolerance=1e-6)
    assert np.allclose(zero.values, 0)


def test_quadrature_is_exact_for_moments_of_start_vector():
    matrix = matrix_with(np.linspace(-2, 5, 40))
    v = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    v /= v.norm()
    values, vectors_ = np.linalg.eigh(lanczos(lambda x: matrix @ x, v, 6))
    for power in range(12):
        exact = (v @ torch.linalg.matrix_power(matrix, power) @ v).item()
        assert float(vectors_[0] ** 2 @ values**power) == pytest.approx(exact, rel=1e-9)


def test_full_lanczos_finds_each_eigenvalue_once():
    true = np.concatenate([np.zeros(1), np.geomspace(1e-3, 1e3, 59)])
    matrix = matrix_with(true)
    found = np.linalg.eigvalsh(lanczos(lambda x: matrix @ x, torch.ones(60, dtype=torch.float64), 60))
    assert np.allclose(found, true, atol=1e-8)
