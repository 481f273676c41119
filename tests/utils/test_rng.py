"""Draws from Python's and numpy's generators are detected."""

from __future__ import annotations

import random

import numpy as np
import pytest
from torch import nn

from sparsesam.utils.restore import other_generators
from tests import cases

DRAWS = {
    "python": random.random,
    "numpy": np.random.random,
    "normal number, of which numpy keeps another": np.random.randn,
}


@pytest.mark.parametrize("before", DRAWS)
@pytest.mark.parametrize("draw", DRAWS)
def test_every_draw_changes_state(before, draw):
    DRAWS[before]()
    for _ in range(3):
        at = other_generators()
        assert other_generators() == at
        DRAWS[draw]()
        assert other_generators() != at


class Body(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.layer, self.draw = nn.Linear(6, 6), draw

    def forward(self, x):
        return self.layer(x) * float(self.draw() > 0)


@pytest.mark.parametrize("draw", [lambda: 1.0, *DRAWS.values()], ids=["nothing", *DRAWS])
def test_module_that_draws_is_rerun(draw):
    model = nn.Sequential(Body(draw), nn.Tanh(), nn.Linear(6, 3)).double()
    opt = cases.ssam(model, "2.*")
    cases.with_closure(opt, model, *cases.vectors(8))
    reused = "used again" in opt.engine_report()["0.layer.weight"]
    assert reused == (draw not in DRAWS.values())
