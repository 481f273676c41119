import math

import pytest
import torch
from torch import nn

from sparsesam.analysis import Objective, sharpness
from tests.analysis.oracles import best_in_ball, objective_of
from tests.cases import half_masks, mlp


class Quadratic(nn.Module):
    def __init__(self, matrix, linear):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(len(linear), dtype=torch.float64))
        self.matrix, self.linear = matrix, linear

    def forward(self):
        return self.linear @ self.w + self.w @ self.matrix @ self.w / 2


def quadratic(seed=0, size=8):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return Quadratic(root + root.T, torch.randn(size, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("masked", [False, True])
def test_sharpness_of_quadratic_is_maximum_over_ball(seed, masked):
    model = quadratic(seed)
    kept = torch.arange(8) % 2 == 0 if masked else torch.ones(8, dtype=torch.bool)
    objective = Objective(model, [torch.zeros(1)], model_loss=lambda m, b: m())
    found = sharpness(objective, 0.7, steps=200, masks={"w": kept} if masked else None)
    best = best_in_ball(model.linear[kept].numpy(), model.matrix[kept][:, kept].numpy(), 0.7)
    assert found.increase == pytest.approx(best, rel=1e-3)
    assert found.increase <= best * (1 + 1e-9)
    assert found.one_step <= found.increase
    assert not model.w.any()


def test_masked_sharpness_is_at_most_full():
    model = mlp()
    objective = objective_of(model)
    full, masked = sharpness(objective, 0.5), sharpness(objective, 0.5, masks=half_masks(model))
    assert 0 < masked.increase < full.increase
    assert masked.weights_perturbed == sum(int(mask.sum()) for mask in half_masks(model).values())


def test_ascent_from_critical_point_starts_at_random():
    model = Quadratic(torch.diag(torch.tensor([4.0, 1.0], dtype=torch.float64)), torch.zeros(2, dtype=torch.float64))
    objective = Objective(model, [torch.zeros(1)], model_loss=lambda m, b: m())
    assert sharpness(objective, 0.5, steps=100).increase == pytest.approx(0.5, rel=1e-3)


def test_non_finite_loss_in_ball_is_infinite_increase():
    model = nn.Linear(1, 1, bias=False).double()
    model.weight.data.fill_(0.9)
    objective = Objective(model, [torch.ones(1, 1)], model_loss=lambda model, _: -torch.log(1 - model.weight).sum())
    found = sharpness(objective, rho=0.2)
    assert math.isinf(found.increase)
    assert any("not finite" in note for note in found.notes)
    assert float(model.weight.detach()) == 0.9
