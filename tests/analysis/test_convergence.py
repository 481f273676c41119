import json
import math

import numpy as np
import pytest
import torch

from sparsesam.analysis import measure_convergence, nonconvex_logistic, tanh_network
from sparsesam.analysis.convergence import Smoothness, theorem_constants


@pytest.mark.parametrize(("method", "condition"), [("SAM", "rho_0 <= G eta_0 / 2"), ("SSAM", "rho_0 <= G eta_0 / 5")])
def test_measured_run_stays_below_the_theorem_where_its_assumptions_hold(method, condition):
    found = measure_convergence(method, steps=60, runs=2)
    assert all(one.holds for one in found.assumptions)
    assert condition in [one.text for one in found.assumptions]
    assert np.all(found.measured <= found.bound_harmonic)
    assert found.measured[-1] < found.measured[0]
    assert found.observed.L <= found.assumed.L
    assert json.dumps(found.to_dict(), allow_nan=False)


def test_constants_are_those_of_the_theorems():
    assumed, numbers = Smoothness(L=2.0, G=3.0, sigma=0.7), {"eta_0": 0.5, "rho_0": 0.1, "decrease": 1.5}
    assert theorem_constants("SAM", assumed, **numbers) == pytest.approx((6.0, 2 * (2 * 0.49 * 0.5 + 2 * 3 * 0.1)))
    third, fourth = theorem_constants("SSAM", assumed, **numbers)
    assert third == pytest.approx(2 / 0.5 * (1.5 + 8 * 0.25 * 0.01 * math.pi**2 / 6))
    assert fourth == pytest.approx(2 * (2 * 0.49 * 0.5 + 2 * 3 * 0.1))


def test_first_steps_follow_the_paper_by_hand():
    """One run without noise: rho_t = rho_0 / sqrt(t) and eta_t = eta_0 / sqrt(t)."""
    found = measure_convergence("SAM", steps=3, runs=1, sigma=0.0, eta_0=0.5, rho_0=0.2, points=10)
    model = nonconvex_logistic().make()
    squared = []
    for t in (1, 2, 3):
        (g,) = torch.autograd.grad(model(), [model.w])
        squared.append(g.square().sum().item())
        with torch.no_grad():
            w = model.w.clone()
            model.w += 0.2 / math.sqrt(t) * g / g.norm()
        (there,) = torch.autograd.grad(model(), [model.w])
        with torch.no_grad():
            model.w.copy_(w - 0.5 / math.sqrt(t) * there)
    assert found.measured == pytest.approx([np.mean(squared[:t]) for t in found.T], rel=1e-9)
    assert found.loss[-1] == pytest.approx(model().item(), rel=1e-9)


def test_violated_assumptions_and_unknown_constants_are_told():
    too_large = measure_convergence("SAM", steps=5, runs=1, eta_0=5.0, rho_0=100.0)
    assert "does not apply" in too_large.notes[0]
    network = measure_convergence("SSAM", problem=tanh_network(), steps=20, runs=1)
    assert any("lower bound of the true constant" in note for note in network.notes)


def test_divergence_is_told_not_averaged():
    with pytest.raises(ValueError, match="diverged"):
        measure_convergence("SAM", problem=tanh_network(), steps=400, runs=1, eta_0=1e6, rho_0=1.0)
