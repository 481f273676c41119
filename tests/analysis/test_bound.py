import math

import pytest
from torch.nn import functional as F

from sparsesam.analysis import (
    Objective,
    complexity_terms,
    generalization_bound,
    sharpness,
)
from tests.cases import mlp, vectors


def test_bound_has_every_term_of_theorem():
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


def test_vacuous_bounds_are_flagged():
    objective = Objective(mlp(), [vectors(16)], F.cross_entropy)
    vacuous = generalization_bound(objective, classes=3)
    assert vacuous.vacuous
    assert vacuous.threshold == math.log(3)
    informative = generalization_bound(objective, n=10**9, classes=1000)
    assert not informative.vacuous
    assert "16 of the 1000000000 samples" in informative.notes[-1]


def test_invalid_numbers_raise():
    objective = Objective(mlp(), [vectors(16)], F.cross_entropy)
    with pytest.raises(ValueError, match="classes"):
        generalization_bound(objective, classes=1)
    for wrong in ({"n": 1}, {"k": 0}, {"delta": 0.0}, {"rho": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            complexity_terms(**{"squared_norm": 1.0, "k": 3, "n": 10, "delta": 0.1, "rho": 0.1, **wrong})
