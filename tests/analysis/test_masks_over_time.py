import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsesam.analysis import (
    Objective,
    fisher_vs_hessian,
    masks_over_time,
)
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
    x, _ = vectors(40_000)
    objective = Objective(model, [(x, torch.zeros(40_000, dtype=torch.long))], F.cross_entropy)
    assert fisher_vs_hessian(objective, labels="sampled").pearson > 0.98


def test_large_models_need_probes():
    objective = Objective(mlp(), [vectors(4)], F.cross_entropy)
    with pytest.raises(ValueError, match="probes=100"):
        fisher_vs_hessian(objective, exact_up_to=50)
    assert fisher_vs_hessian(objective, exact_up_to=50, probes=5).products == 5
