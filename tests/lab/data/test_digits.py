import torch

from sparsesam.lab.data.digits import load_digits


def test_the_split_has_the_documented_sizes_and_is_stratified():
    digits = load_digits()
    assert digits.train.images.shape == (1000, 1, 8, 8)
    assert digits.test.images.shape == (797, 1, 8, 8)
    assert (digits.train.images.min(), digits.train.images.max()) == (0, 255)
    shares = [part.labels.bincount() / len(part.labels) for part in (digits.train, digits.test)]
    assert torch.allclose(*shares, atol=2e-3)


def test_loading_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    load_digits()
    assert torch.equal(before, torch.random.get_rng_state())
