import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsesam.analysis import (
    Objective,
    complexity_terms,
    fisher_vs_hessian,
    generalization_bound,
    masks_over_time,
    measure_convergence,
    nonconvex_logistic,
    sharpness,
    tanh_network,
)
from sparsesam.analysis.convergence import theorem_constants
from tests.analysis.oracles import dense_hessian
from tests.cases import mlp, vectors


def mask(text):
    return torch.tensor([character == "1" for character in text])


def test_density_overlap_and_weights_ever_perturbed():
    found = masks_over_time([
        (0, {"a": mask("1100"), "b": mask("10")}),
        (5, {"a": mask("1010"), "b": mask("10")}),
        (9, {"a": mask("0000"), "b": mask("00")}),
    ])  # fmt: skip
    assert found.steps == [0, 5, 9]
    assert found.density == pytest.approx([3 / 6, 3 / 6, 0])
    assert found.density_by_layer["a"] == pytest.approx([0.5, 0.5, 0])
    assert found.overlap == pytest.approx([2 / 4, 0])
    assert found.overlap_by_layer["a"] == pytest.approx([1 / 3, 0])
    assert found.overlap_by_chance[0] == pytest.approx((4 * 0.25 + 2 * 0.25) / (4 * 0.75 + 2 * 0.75))
    assert found.ever == pytest.approx(4 / 6)
    assert found.ever_by_layer == {"a": 0.75, "b": 0.5}
    assert found.always == 0


def test_one_snapshot_has_no_overlap_and_two_empty_masks_have_none_defined():
    assert len(masks_over_time([(0, {"a": mask("10")})]).overlap) == 0
    empty = masks_over_time([(0, {"a": mask("00")}), (1, {"a": mask("00")})])
    assert math.isnan(empty.overlap[0])
    assert json.dumps(empty.to_dict(), allow_nan=False)


def test_snapshots_that_do_not_belong_together_are_named():
    with pytest.raises(ValueError, match="empty"):
        masks_over_time([])
    with pytest.raises(ValueError, match="no masks"):
        masks_over_time([(0, {})])
    with pytest.raises(ValueError, match="other names or shapes"):
        masks_over_time([(0, {"a": mask("1")}), (1, {"b": mask("1")})])
    with pytest.raises(ValueError, match="order"):
        masks_over_time([(3, {"a": mask("1")}), (1, {"a": mask("1")})])


def test_fisher_and_hessian_diagonals_are_correlated_as_defined():
    model, (x, y) = mlp(), vectors(12)
    found = fisher_vs_hessian(Objective(model, [(x, y)], F.cross_entropy))
    squares = 0
    for i in range(12):
        gradients = torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters()))
        squares = squares + torch.cat([g.reshape(-1) for g in gradients]).square() / 12
    f, h = squares.numpy(), np.diag(dense_hessian(model, [(x, y)]))
    ranks = [np.argsort(np.argsort(values)) for values in (f, h)]
    assert found.pearson == pytest.approx(np.corrcoef(f, h)[0, 1], rel=1e-9)
    assert found.spearman == pytest.approx(np.corrcoef(*ranks)[0, 1], rel=1e-9)
    assert found.pearson_magnitude == pytest.approx(np.corrcoef(f, np.abs(h))[0, 1], rel=1e-9)
    half = round(len(f) / 2)
    common = len(set(np.argsort(-f)[:half]) & set(np.argsort(-np.abs(h))[:half])) / half
    assert found.kept_in_common["0.5"] == pytest.approx(common)
    assert found.negative_share == pytest.approx((h < 0).mean())


def test_fisher_equals_hessian_for_labels_of_the_model_of_a_linear_classifier():
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    x, _ = vectors(4000)
    objective = Objective(model, [(x, torch.zeros(4000, dtype=torch.long))], F.cross_entropy)
    assert fisher_vs_hessian(objective, labels="sampled").pearson > 0.95


def test_large_models_need_probes():
    objective = Objective(mlp(), [vectors(4)], F.cross_entropy)
    with pytest.raises(ValueError, match="probes=100"):
        fisher_vs_hessian(objective, exact_up_to=50)
    assert fisher_vs_hessian(objective, exact_up_to=50, probes=5).products == 5


def test_bound_is_the_theorem_with_every_term():
    model, (x, y) = mlp(), vectors(16)
    objective = Objective(model, [(x, y)], F.cross_entropy)
    found = generalization_bound(objective, 0.3, n=50000, delta=0.1, classes=3)
    k, n, norm = 119, 50000, sum(float(p.detach().square().sum()) for p in model.parameters())
    inside = k * math.log(1 + norm / 0.09 * (1 + math.sqrt(math.log(n) / k)) ** 2)
    inside += 4 * math.log(n / 0.1) + 8 * math.log(6 * n + 3 * k)
    assert found.complexity == pytest.approx(math.sqrt(inside / (n - 1)), rel=1e-12)
    assert found.max_loss == sharpness(objective, 0.3).max_loss
    assert found.bound == found.max_loss + found.complexity
    assert found.dimension_term + found.confidence_term + found.remainder == pytest.approx(inside)


def test_vacuous_bounds_are_called_so():
    objective = Objective(mlp(), [vectors(16)], F.cross_entropy)
    vacuous = generalization_bound(objective, classes=3)
    assert vacuous.vacuous
    assert vacuous.words[0].startswith("vacuous")
    assert "no training loss, not even 0" in vacuous.words[1]
    informative = generalization_bound(objective, n=10**9, classes=1000)
    assert not informative.vacuous


def test_wrong_numbers_in_the_bound_are_named():
    objective = Objective(mlp(), [vectors(16)], F.cross_entropy)
    with pytest.raises(ValueError, match="classes"):
        generalization_bound(objective, classes=1)
    for wrong in ({"n": 1}, {"k": 0}, {"delta": 0.0}, {"rho": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            complexity_terms(**{"squared_norm": 1.0, "k": 3, "n": 10, "delta": 0.1, "rho": 0.1, **wrong})


@pytest.mark.parametrize(("method", "condition"), [("SAM", "rho_0 <= G eta_0 / 2"), ("SSAM", "rho_0 <= G eta_0 / 5")])
def test_measured_run_stays_below_the_theorem_where_its_assumptions_hold(method, condition):
    found = measure_convergence(method, steps=60, runs=2)
    assert all(one.holds for one in found.assumptions)
    assert condition in [one.text for one in found.assumptions]
    assert found.within_bound_harmonic
    assert found.measured[-1] < found.measured[0]
    assert found.constants["L along the run"] <= found.constants["L"]
    assert json.dumps(found.to_dict(), allow_nan=False)


def test_constants_are_those_of_the_theorems():
    numbers = {"eta_0": 0.5, "rho_0": 0.1, "L": 2.0, "G": 3.0, "sigma": 0.7, "decrease": 1.5}
    assert theorem_constants("SAM", **numbers) == pytest.approx((6.0, 2 * (2 * 0.49 * 0.5 + 2 * 3 * 0.1)))
    third, fourth = theorem_constants("SSAM", **numbers)
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


def test_known_constants_bound_the_problem_everywhere():
    problem = nonconvex_logistic(samples=50, size=5)
    model, generator = problem.make(), torch.Generator().manual_seed(0)
    for _ in range(20):
        w = 3 * torch.randn(5, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            model.w.copy_(w)
        (g,) = torch.autograd.grad(model(), [model.w], create_graph=True)
        rows = [torch.autograd.grad(entry, [model.w], retain_graph=True)[0] for entry in g]
        assert g.norm() <= problem.G
        assert torch.linalg.matrix_norm(torch.stack(rows), 2) <= problem.L


def test_violated_assumptions_and_unknown_constants_are_told():
    too_large = measure_convergence("SAM", steps=5, runs=1, eta_0=5.0, rho_0=100.0)
    assert "promises nothing" in too_large.words[0]
    network = measure_convergence("SSAM", problem=tanh_network(), steps=20, runs=1)
    assert any("lower bound of the true constant" in words for words in network.words)


def test_divergence_is_told_not_averaged():
    with pytest.raises(ValueError, match="diverged"):
        measure_convergence("SAM", problem=tanh_network(), steps=400, runs=1, eta_0=1e6, rho_0=1.0)
