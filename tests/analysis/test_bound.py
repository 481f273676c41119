import math

import pytest

from sparsesam.analysis import generalization_bound, sharpness
from tests.analysis.oracles import objective_of
from tests.cases import mlp


def test_bound_has_every_term_of_theorem():
    model = mlp()
    found = generalization_bound(objective_of(model), 0.3, n=50000, delta=0.1, classes=3)
    k, n, norm = 119, 50000, sum(float(p.detach().square().sum()) for p in model.parameters())
    inside = k * math.log(1 + norm / 0.09 * (1 + math.sqrt(math.log(n) / k)) ** 2)
    inside += 4 * math.log(n / 0.1) + 8 * math.log(6 * n + 3 * k)
    assert found.complexity == pytest.approx(math.sqrt(inside / (n - 1)), rel=1e-12)
    assert found.max_loss == sharpness(objective_of(model), 0.3).max_loss
    assert found.bound == found.max_loss + found.complexity
    assert found.dimension_term + found.confidence_term + found.remainder == pytest.approx(inside)


def test_bound_is_vacuous_unless_below_loss_of_uniform_prediction():
    vacuous = generalization_bound(objective_of(mlp()), classes=3)
    assert (vacuous.vacuous, vacuous.threshold, vacuous.n) == (True, math.log(3), 17)
    informative = generalization_bound(objective_of(mlp()), n=10**9, classes=1000)
    assert not informative.vacuous
    assert "17 of the 1000000000 samples" in informative.notes[-1]
