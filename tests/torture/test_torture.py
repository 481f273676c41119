"""The short form of `make torture`."""

import itertools

import pytest
import torch

import sparsesam
from tests import cases
from tests.torture import crash, damage, fuzz, numerics, optimizers, soak


def test_damaged_files(tmp_path):
    assert damage.survive(tmp_path, 175).total() == 175


def test_crashes(tmp_path):
    assert crash.survive(tmp_path, kills=8).total() == 18


def test_malformed_inputs(tmp_path):
    assert fuzz.survive(tmp_path, 2000)["refused"] > 500


@pytest.mark.parametrize("method", optimizers.METHODS)
def test_sequences_of_steps_equal_the_equations(method):
    assert optimizers.survive(4, methods=[method])["sequences"] >= 4


def test_sequences_cover_every_optimizer():
    model = cases.mlp()
    made = {type(make(cases.sgd(model), model, mask=None, norm="full")) for _, make in optimizers.METHODS.values()}
    public = [getattr(sparsesam, name) for name in sparsesam.__all__]
    kinds = {kind for kind in public if isinstance(kind, type) and issubclass(kind, sparsesam.SharpnessAware)}
    assert made == kinds - {sparsesam.SharpnessAware}


def test_interrupted_refresh_leaves_old_masks_or_new_ones():
    for line in itertools.count(1):
        model = cases.mlp()
        opt = sparsesam.SSAM(cases.sgd(model), model, mask=sparsesam.random_mask(sparsity=0.5, refresh=2))
        cases.train(model, opt, range(2))
        old = opt.masks
        try:
            with optimizers.interrupted_at_line(line, files=("checkpoint.py", "state.py")):
                cases.train(model, opt, range(2, 3))
        except KeyboardInterrupt:
            assert len({torch.equal(mask, old[name]) for name, mask in opt.masks.items()}) == 1, line
        else:
            break
    assert line > 40


@pytest.mark.parametrize("family", soak.FAMILIES)
def test_long_training_leaves_nothing_behind(family):
    assert "steps" in soak.soak(family, seconds=0, steps=4)


def test_numbers_at_the_ends_of_their_range():
    assert numerics.survive(300).total() > 300
