import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsesam.analysis import (
    HessianOperator,
    Objective,
    hessian_eigenvalues,
    hessian_trace,
)
from tests.analysis.oracles import dense_hessian
from tests.cases import convnet, images, mlp, vectors


def batches():
    return [vectors(12), vectors(5, seed=2)]


@pytest.mark.parametrize("keep_graph", [False, True])
def test_products_match_dense_matrix(keep_graph):
    model = mlp()
    dense = dense_hessian(model, batches())
    hessian = HessianOperator(Objective(model, batches(), F.cross_entropy), keep_graph=keep_graph)
    v = torch.randn(hessian.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with hessian.measuring():
        for _ in range(2):
            assert np.allclose((hessian @ v).numpy(), dense @ v.numpy(), atol=1e-12)
    assert hessian.products == 2
    assert all(p.grad is None for p in model.parameters())


def test_unused_parameters_are_zero_rows_and_frozen_ones_excluded():
    model = nn.ModuleDict({"used": mlp(), "idle": nn.Linear(4, 4).double()})
    model["used"][0].requires_grad_(False)
    objective = Objective(model, batches(), model_loss=lambda m, b: F.cross_entropy(m["used"](b[0]), b[1]))
    hessian = HessianOperator(objective)
    assert not any(name.startswith("used.0") for name in hessian.parameters)
    with hessian.measuring():
        product = hessian.named(hessian @ torch.ones(hessian.size, dtype=torch.float64))
    assert not product["idle.weight"].any()
    assert product["used.4.weight"].any()
    assert "idle.weight" in hessian.notes[0]
    assert model["used"][0].weight.requires_grad is False


def test_kinks_are_detected_in_layers_and_functions():
    smooth = hessian_trace(Objective(mlp(), batches(), F.cross_entropy), probes=2)
    kinked = hessian_trace(Objective(convnet(), [images(4)], F.cross_entropy), probes=2)
    assert smooth.notes == []
    assert "Relu" in kinked.notes[0]


def test_attention_has_second_derivatives():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True).double()
    x, _ = vectors(8)
    objective = Objective(model, [(x.view(2, 4, 6),)], model_loss=lambda m, b: m(b[0]).square().sin().mean())
    assert hessian_eigenvalues(objective, 1).converged
