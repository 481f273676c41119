import pytest
import torch

from sparsesam.lab.data import load_digits_split


def test_split_has_the_documented_shapes_and_range():
    train_x, train_y, test_x, test_y = load_digits_split()
    assert train_x.shape == (1000, 1, 8, 8)
    assert test_x.shape == (797, 1, 8, 8)
    assert train_y.shape == (1000,)
    assert test_y.shape == (797,)
    assert train_x.dtype == torch.float32
    assert (train_x.min(), train_x.max()) == (0, 1)


def test_flips_exactly_the_asked_share_of_the_training_labels_only():
    clean, noisy = load_digits_split(flip=0.0, seed=3), load_digits_split(flip=0.3, seed=3)
    assert (clean[1] != noisy[1]).sum() == 300
    for index in (0, 2, 3):
        assert torch.equal(clean[index], noisy[index])


def test_split_is_stratified():
    _, train_y, _, test_y = load_digits_split(flip=0.0)
    train_share = train_y.bincount() / len(train_y)
    assert torch.allclose(train_share, test_y.bincount() / len(test_y), atol=2e-3)


def test_seed_decides_split_and_flips():
    first, again, other = load_digits_split(seed=1), load_digits_split(seed=1), load_digits_split(seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    load_digits_split()
    assert torch.equal(before, torch.random.get_rng_state())


def test_refuses_an_impossible_share():
    with pytest.raises(ValueError, match=r"flip must be in \[0, 1\], got 1.5"):
        load_digits_split(flip=1.5)
