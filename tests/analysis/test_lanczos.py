import itertools

import numpy as np
import pytest
import torch

from sparsesam.analysis.lanczos import lanczos, top_eigenpairs


def matrix_with(values, seed=0):
    random = np.random.default_rng(seed).standard_normal((len(values), len(values)))
    q, _ = np.linalg.qr(random)
    return torch.from_numpy(q @ np.diag(values) @ q.T)


def projected(matrix, start, steps):
    *_, space = itertools.islice(lanczos(lambda x: matrix @ x, start), steps)
    return space.projected


def test_repeated_and_few_distinct_eigenvalues_terminate():
    matrix = torch.diag(torch.tensor([3.0, 3, 3, 1, 1, 1, 1, 1], dtype=torch.float64))
    start = torch.ones(8, dtype=torch.float64)
    values, *_ = top_eigenpairs(lambda v: matrix @ v, start, 5, tolerance=1e-6)
    assert np.allclose(values[0], 3)
    values, *_ = top_eigenpairs(lambda v: 0 * v, start, 3, tolerance=1e-6)
    assert np.allclose(values, 0)


def test_quadrature_is_exact_for_moments_of_start_vector():
    matrix = matrix_with(np.linspace(-2, 5, 40))
    v = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    v /= v.norm()
    values, vectors = np.linalg.eigh(projected(matrix, v, 6))
    for power in range(12):
        exact = (v @ torch.linalg.matrix_power(matrix, power) @ v).item()
        assert float(vectors[0] ** 2 @ values**power) == pytest.approx(exact, rel=1e-9)


def test_full_lanczos_finds_each_eigenvalue_once():
    true = np.concatenate([np.zeros(1), np.geomspace(1e-3, 1e3, 59)])
    matrix = matrix_with(true)
    found = np.linalg.eigvalsh(projected(matrix, torch.ones(60, dtype=torch.float64), 60))
    assert np.allclose(found, true, atol=1e-8)
