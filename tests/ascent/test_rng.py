"""Draws from Python's and numpy's generators are noticed, each of them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sparsesam.ascent.rng import OtherGenerators

DRAWS = {
    "nothing": lambda: None,
    "python": random.random,
    "numpy": np.random.random,
    "a normal number, which leaves one ready": np.random.randn,
    "numpy's seed": lambda: np.random.seed(5),  # noqa: NPY002
}


@pytest.mark.parametrize("before", DRAWS)
@pytest.mark.parametrize("draw", DRAWS)
def test_every_draw_changes_what_is_read(before, draw):
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    others = OtherGenerators()
    others.read()
    DRAWS[before]()  # between steps
    for _ in range(3):
        at = others.read()
        DRAWS[draw]()
        again = draw == "numpy's seed" and before == "numpy's seed"
        if not again:
            assert (others.read() == at) == (draw == "nothing")
        if draw == "numpy's seed":
            break
