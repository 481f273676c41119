import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsesam.analysis import Objective, fisher_vs_hessian
from tests.analysis.oracles import dense_hessian
from tests.cases import mlp, vectors


def test_correlation_of_fisher_and_hessian_diagonals():
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


def test_fisher_equals_hessian_of_linear_classifier_for_sampled_labels():
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    x, _ = vectors(4_000)
    objective = Objective(model, [(x, torch.zeros(4_000, dtype=torch.long))], F.cross_entropy)
    sampled = fisher_vs_hessian(objective, labels="sampled").pearson
    assert sampled > 0.95 > fisher_vs_hessian(objective).pearson


def test_large_models_use_estimates_and_report_it():
    objective = Objective(mlp(), [vectors(4)], F.cross_entropy)
    assert fisher_vs_hessian(objective).hessian == "exact"
    estimated = fisher_vs_hessian(objective, exact_up_to=50)
    assert (estimated.products, estimated.hessian) == (100, "estimated with 100 random sign vectors")
    seen = []
    fewer = fisher_vs_hessian(objective, exact_up_to=50, probes=5, progress=lambda *at: seen.append(at))
    assert fewer.products == 5
    assert seen == [(done, 5) for done in range(1, 6)]
