"""The short form of `python -m tests.torture optimizers soak numerics`."""

import pytest

import sparsesam
from tests import cases
from tests.torture import numerics, optimizers, soak


@pytest.mark.parametrize("method", optimizers.METHODS)
def test_sequences_of_steps_equal_the_equations(method):
    assert optimizers.survive(None, 4, methods=[method])["sequences"] >= 4


def test_sequences_cover_every_optimizer():
    model = cases.mlp()
    made = {type(make(cases.sgd(model), model, mask=None, norm="full")) for _, make in optimizers.METHODS.values()}
    public = [getattr(sparsesam, name) for name in sparsesam.__all__]
    optimizers_ = {one for one in public if isinstance(one, type) and issubclass(one, sparsesam.SharpnessAware)}
    assert made == optimizers_ - {sparsesam.SharpnessAware}


@pytest.mark.parametrize("family", soak.FAMILIES)
def test_long_training_leaves_nothing_behind(family):
    assert "steps" in soak.soak(family, seconds=0, steps=4)


def test_numbers_at_the_ends_of_their_range():
    assert sum(numerics.survive(None, 300).values()) > 300
