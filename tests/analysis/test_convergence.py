import json
import math

import numpy as np
import pytest
import torch

from sparsesam.analysis import SmoothProblem, measure_convergence, nonconvex_logistic


@pytest.mark.parametrize(("method", "condition"), [("SAM", "rho_0 <= G eta_0 / 2"), ("SSAM", "rho_0 <= G eta_0 / 5")])
def test_measured_run_stays_below_bound_when_assumptions_hold(method, condition):
    found = measure_convergence(method, steps=60, runs=2)
    assert found.violated == []
    assert condition in found.assumptions
    assert np.all(found.measured <= found.bound_harmonic)
    assert found.measured[-1] < found.measured[0]
    assert json.dumps(found.to_dict(), allow_nan=False)


def test_constants_match_theorems():
    """At sparsity 0 the runs of SSAM are those of SAM: only the constant of theorem 2 is larger."""
    options = {"steps": 2, "runs": 1, "sigma": 0.7, "eta_0": 0.5, "rho_0": 0.1, "sparsity": 0.0}
    sam, ssam = (measure_convergence(method, **options) for method in ("SAM", "SSAM"))
    L, G = nonconvex_logistic().L, nonconvex_logistic().G
    assert sam.log_constant == ssam.log_constant == pytest.approx(2 * (L * 0.49 * 0.5 + L * G * 0.1))
    assert ssam.constant - sam.constant == pytest.approx(2 / 0.5 * L**3 * 0.25 * 0.01 * math.pi**2 / 6)
    assert sam.bound[-1] == pytest.approx((sam.constant + sam.log_constant * math.log(2)) / math.sqrt(2))


def test_first_steps_match_paper():
    """One run without noise: rho_t = rho_0 / sqrt(t) and eta_t = eta_0 / sqrt(t)."""
    found = measure_convergence("SAM", steps=3, runs=1, sigma=0.0, eta_0=0.5, rho_0=0.2)
    problem, squared = nonconvex_logistic(), []
    w, gradient = problem.start, torch.func.grad(problem.f)
    for t in (1, 2, 3):
        g = gradient(w)
        squared.append(g.square().sum().item())
        w = w - 0.5 / math.sqrt(t) * gradient(w + 0.2 / math.sqrt(t) * g / g.norm())
    assert found.measured == pytest.approx([np.mean(squared[:t]) for t in found.T], rel=1e-9)
    assert found.constant == pytest.approx(2 / 0.5 * (problem.f(problem.start) - problem.f(w)).item(), rel=1e-9)


def test_violated_assumptions_are_reported():
    too_large = measure_convergence("SAM", steps=5, runs=1, eta_0=5.0, rho_0=100.0)
    assert too_large.violated == ["rho_0 <= G eta_0 / 2", "eta_0 <= 1 / L"]


def test_divergence_is_reported_and_not_averaged():
    parabola = SmoothProblem(lambda w: w.square().sum(), torch.ones(2, dtype=torch.float64), L=2.0, G=1.0)
    with pytest.raises(ValueError, match="diverged"):
        measure_convergence("SAM", problem=parabola, steps=400, runs=1, eta_0=1e6, rho_0=1.0)


def test_known_constants_bound_problem_everywhere():
    problem = nonconvex_logistic(samples=50, size=5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        w = 3 * torch.randn(5, generator=generator, dtype=torch.float64)
        assert torch.func.grad(problem.f)(w).norm() <= problem.G
        assert torch.linalg.matrix_norm(torch.func.hessian(problem.f)(w), 2) <= problem.L
