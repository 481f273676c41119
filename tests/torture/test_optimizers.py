"""The short form of `python -m tests.torture optimizers soak numerics`."""

from tests.torture import numerics


def test_numbers_at_the_ends_of_their_range():
    assert sum(numerics.survive(None, 300).values()) > 300
