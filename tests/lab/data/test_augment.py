import pytest
import torch

from sparsesam.lab.data import Augment, load_dataset, standard_augmentation
from sparsesam.lab.data.augment import denormalize, mixup
from tests.lab.data.files import generator

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
PLAIN = Augment(MEAN, STD).plain


def batch():
    return torch.randint(0, 256, (16, 3, 12, 10), generator=generator(), dtype=torch.uint8)


def one_crop_and_flip(image, top, left, flip, padding):
    channels, height, width = image.shape
    padded = image.new_zeros(channels, height + 2 * padding, width + 2 * padding)
    padded[:, padding : padding + height, padding : padding + width] = image
    window = padded[:, top : top + height, left : left + width]
    return window.flip(-1) if flip else window


def one_cut_out(image, top, left, chosen, size):
    image = image.clone()
    if chosen:
        image[:, max(0, top) : top + size, max(0, left) : left + size] = 0
    return image


def test_normalization_equals_its_equation_and_is_inverted():
    images = batch()
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (MEAN, STD))
    torch.testing.assert_close(PLAIN(images), ((images / 255.0 - mean) / std).float())
    assert torch.equal(denormalize(PLAIN(images), MEAN, STD), images)


@pytest.mark.parametrize("padding", [0, 1, 4])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("cutout", [0, 1, 6, 16])
def test_augmentation_equals_loop_over_images_with_same_draws(padding, flip, cutout):
    images, draw, half = batch(), generator(5), cutout // 2
    starts, flips = torch.zeros(16, 4, dtype=torch.long), torch.zeros(16)
    if padding or flip:
        starts[:, :2] = torch.stack([torch.randint(0, 2 * padding + 1, (16,), generator=draw) for _ in range(2)], 1)
        flips = torch.rand(16, generator=draw) < 0.5 if flip else flips
    seen = [one_crop_and_flip(*case, padding) for case in zip(images, *starts[:, :2].T, flips, strict=True)]
    seen = PLAIN(torch.stack(seen))
    if cutout:
        starts[:, 2:] = torch.stack([torch.randint(-half, side - half, (16,), generator=draw) for side in (12, 10)], 1)
        chosen = torch.rand(16, generator=draw) < 0.5
        seen = torch.stack([one_cut_out(*case, cutout) for case in zip(seen, *starts[:, 2:].T, chosen, strict=True)])
    assert torch.equal(Augment(MEAN, STD, padding, flip, cutout)(images, generator(5)), seen)
    assert torch.equal(images, batch())  # its argument is unchanged


def test_standard_augmentation_of_cifar_and_digits():
    digits = load_dataset("digits")
    assert standard_augmentation(digits) == Augment(digits.mean, digits.std, padding=1)
    images = torch.zeros(10, 3, 32, 32, dtype=torch.uint8)
    cifar = type(digits)(*[(images, torch.arange(10))] * 2, name="", classes=digits.classes, mean=MEAN, std=STD)
    assert standard_augmentation(cifar) == Augment(MEAN, STD, padding=4, flip=True, cutout=16)
    assert standard_augmentation(cifar, cutout=False).cutout == 0


def test_mixup_mixes_images_and_labels_by_same_share():
    images, labels = torch.eye(6).view(6, 6, 1, 1), torch.arange(6)
    mixed, targets = mixup(images, labels, alpha=1.0, num_classes=6, generator=generator(3))
    assert torch.equal(mixed.view(6, 6), targets)
    torch.testing.assert_close(targets.sum(1), torch.ones(6))
    assert ((targets > 0).sum(1) > 1).any()


def test_mixup_share_is_beta_distributed():
    """Beta(a, a) has mean 1/2 and variance 1 / (4 (2 a + 1))."""
    draw = generator()
    shares = []
    while len(shares) < 2000:
        _, targets = mixup(torch.zeros(2, 1, 1, 1), torch.tensor([0, 1]), alpha=0.5, num_classes=2, generator=draw)
        shares.append(float(targets[0, 0]))
    shares = torch.tensor([share for share in shares if share != 1.0])
    # Half of the permutations of two leave each image with itself; the others show the share.
    assert abs(shares.mean() - 0.5) < 0.05
    assert abs(shares.var() - 1 / 8) < 0.02
