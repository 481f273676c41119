"""The short form of `python -m tests.torture soak numerics`."""

import pytest

from tests.torture import numerics, soak


@pytest.mark.parametrize("family", soak.FAMILIES)
def test_long_training_leaves_nothing_behind(family):
    assert "steps" in soak.soak(family, seconds=0, steps=4)


def test_numbers_at_the_ends_of_their_range():
    assert sum(numerics.survive(None, 300).values()) > 300
