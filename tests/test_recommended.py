"""recommended(): one call, by cost."""

from __future__ import annotations

import pytest

import sparsesam
from tests import cases


@pytest.mark.parametrize("cost", [1.125, 1.25, 2.0])
def test_ascent_is_on_an_eighth_of_the_batch(cost):
    model = cases.mlp()
    opt = sparsesam.recommended(cases.sgd(model), model, 0.7, cost=cost)
    seen = []

    def closure(batch):
        x, y = batch
        seen.append(len(x))
        return cases.closure_for(model, opt, x, y)()

    for seed in range(3):
        seen.clear()
        opt.step(closure, batch=cases.vectors(16, seed=seed))
        assert seen == [2, 16]
    assert opt.param_groups[0]["rho"] == 0.7


def test_step_is_the_bases_where_nothing_is_as_good_and_says_so():
    model, twin = cases.mlp(), cases.mlp()
    with pytest.warns(UserWarning, match=r"cost=1.0, no method .* steps are those of the base optimizer"):
        opt = sparsesam.recommended(cases.sgd(model), model, cost=1.0)
    cases.train(model, opt, range(3))
    cases.train(twin, cases.sgd(twin), range(3))
    assert cases.same_state(model, twin)


@pytest.mark.parametrize("cost", [0.5, -1.0, float("nan")])
def test_cost_below_base_raises(cost):
    model = cases.mlp()
    with pytest.raises(ValueError, match="cost must be at least 1"):
        sparsesam.recommended(cases.sgd(model), model, cost=cost)
