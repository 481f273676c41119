import pytest
import torch

from sparsesam.lab.data import flip_labels


def flipped(fraction, num_classes=10):
    labels = torch.arange(200) % num_classes
    generator = torch.Generator().manual_seed(0)
    return labels, flip_labels(labels, fraction=fraction, num_classes=num_classes, generator=generator)


@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
def test_changes_exactly_the_asked_number_to_another_class(fraction):
    labels, noisy = flipped(fraction)
    assert (labels != noisy).sum() == 200 * fraction
    assert noisy.min() >= 0
    assert noisy.max() < 10


def test_two_classes_swap():
    labels, noisy = flipped(1.0, num_classes=2)
    assert torch.equal(noisy, 1 - labels)


def test_does_not_change_its_argument():
    labels, _ = flipped(1.0)
    assert torch.equal(labels, torch.arange(200) % 10)


def test_refuses_a_single_class():
    with pytest.raises(ValueError, match="num_classes must be at least 2, got 1"):
        flip_labels(torch.zeros(3, dtype=torch.long), fraction=0.5, num_classes=1, generator=torch.Generator())


def test_refuses_labels_beyond_the_classes():
    with pytest.raises(ValueError, match=r"labels must be in 0\.\.2 for num_classes=3, got 0 to 3"):
        flip_labels(torch.arange(4), fraction=0.5, num_classes=3, generator=torch.Generator())


def test_every_other_class_is_as_likely():
    labels = torch.zeros(3000, dtype=torch.long)
    noisy = flip_labels(labels, fraction=1.0, num_classes=4, generator=torch.Generator().manual_seed(0))
    assert noisy.bincount(minlength=4)[0] == 0
    assert (noisy.bincount(minlength=4)[1:] - 1000).abs().max() < 100
