import math

import numpy as np
import pytest
import torch

from sparsesam.lab.inspection.convergence import ConvergenceAnalysis, nonconvex_logistic


@pytest.mark.parametrize("method", ["SAM", "SSAM"])
def test_measured_run_stays_below_bound(method):
    found = ConvergenceAnalysis(steps=60, runs=2).compare(method)
    assert np.all(found.measured <= found.bound_harmonic)
    assert found.measured[-1] < found.measured[0]
    assert np.all(found.deviation[1:] > 0)


def test_constants_match_theorems():
    analysis = ConvergenceAnalysis(steps=2, runs=1, sigma=0.7, sparsity=0.0)
    _, _, L, G = nonconvex_logistic()
    for method, rho_0 in (("SAM", G / L / 2), ("SSAM", G / L / 5)):
        found = analysis.compare(method)
        assert found.log_constant == pytest.approx(2 * (L * 0.49 / L + L * G * rho_0))
        assert found.bound[-1] == pytest.approx((found.constant + found.log_constant * math.log(2)) / math.sqrt(2))
        assert found.bound_harmonic[-1] == pytest.approx((found.constant + found.log_constant * 1.5) / math.sqrt(2))


@pytest.mark.parametrize(("method", "divisor"), [("SAM", 2), ("SSAM", 5)])
def test_first_steps_match_paper(method, divisor):
    """One run without noise and mask: rho_t = rho_0 / sqrt(t) and eta_t = eta_0 / sqrt(t)."""
    found = ConvergenceAnalysis(steps=3, runs=1, sigma=0.0, sparsity=0.0).compare(method)
    f, start, L, G = nonconvex_logistic()
    w, gradient, squared, rho_0 = start, torch.func.grad(f), [], G / L / divisor
    for t in (1, 2, 3):
        g = gradient(w)
        squared.append(g.square().sum().item())
        w = w - 1 / L / math.sqrt(t) * gradient(w + rho_0 / math.sqrt(t) * g / g.norm())
    assert found.measured == pytest.approx([np.mean(squared[: int(t)]) for t in found.T], rel=1e-9)
    extra = L**3 / L**2 * rho_0**2 * math.pi**2 / 6 if method == "SSAM" else 0
    assert found.constant == pytest.approx(2 * L * ((f(start) - f(w)).item() + extra), rel=1e-9)


def test_known_constants_bound_problem_everywhere():
    f, start, L, G = nonconvex_logistic()
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        w = 3 * torch.randn(start.shape, generator=generator, dtype=torch.float64)
        assert torch.func.grad(f)(w).norm() <= G
        assert torch.linalg.matrix_norm(torch.func.hessian(f)(w), 2) <= L
