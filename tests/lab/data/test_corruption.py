import pytest
import torch

from sparsesam.lab.data import CORRUPTIONS, corrupt, flip_labels
from sparsesam.lab.data.corruption import fog, gaussian_noise, occlusion, plasma, resolution
from tests.lab.data.files import generator


def images(count=40, channels=3, height=32, width=32):
    return torch.randint(0, 256, (count, channels, height, width), generator=generator(1), dtype=torch.uint8)


@pytest.mark.parametrize("kind", [*CORRUPTIONS, "mixed"])
@pytest.mark.parametrize("rate", [0.0, 0.35, 1.0])
def test_requested_share_is_corrupted(kind, rate):
    clean = images()
    changed = (corrupt(clean, rate, kind, generator()) != clean).flatten(1).any(1)
    assert changed.sum() == 40 * rate
    assert torch.equal(clean, images())  # its argument is unchanged


def test_mixed_has_quarter_of_each():
    corrupted = corrupt(images(), 1.0, "mixed", generator())
    hidden = (corrupted[:, :, 8:24, 8:24] == 0).flatten(1).all(1)
    assert hidden.sum() == 10
    smooth = corrupt(images(), 1.0, "resolution", generator())
    assert (corrupted == smooth).flatten(1).all(1).sum() == 10


def test_generator_determines_everything():
    first, again, other = (corrupt(images(), 0.5, "mixed", generator(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 33, 20), (3, 1, 1)])
def test_any_shape(kind, shape):
    assert corrupt(images(3, *shape), 1.0, kind, generator()).shape == (3, *shape)


def test_noise_has_its_standard_deviation():
    grey = torch.full((20, 3, 32, 32), 0.5)
    noisy = gaussian_noise(grey, generator())
    assert noisy.mean().item() == pytest.approx(0.5, abs=0.002)
    assert noisy.std().item() == pytest.approx(0.1, abs=0.002)


def test_resolution_removes_detail_and_keeps_mean():
    checkerboard = (torch.arange(16)[:, None] + torch.arange(16)).remainder(2).float().expand(1, 1, 16, 16)
    assert torch.allclose(resolution(checkerboard, generator()), torch.tensor(0.5))


def test_fog_whitens_and_flattens():
    clean = images().float() / 255
    foggy = fog(clean, generator())
    assert foggy.mean() > clean.mean() + 0.1
    assert (foggy.flatten(1).std(1) < 0.75 * clean.flatten(1).std(1)).all()


def test_fog_is_smooth_and_varies_between_images():
    fields = plasma(8, 32, 32, generator())
    assert fields.diff(dim=2).abs().mean() < 0.1
    assert fields.std(0).mean() > 0.1


@pytest.mark.parametrize("side", [8, 28, 32])
def test_occlusion_hides_central_quarter(side):
    hidden = occlusion(torch.ones(1, 1, side, side), generator())[0, 0] == 0
    assert hidden.float().mean() == 0.25
    assert torch.equal(hidden, hidden.flip(0))
    assert torch.equal(hidden, hidden.flip(1))


@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
def test_label_noise_changes_requested_number_to_other_classes(fraction):
    labels = torch.arange(200) % 10
    noisy = flip_labels(labels, fraction=fraction, num_classes=10, generator=generator())
    assert (labels != noisy).sum() == 200 * fraction
    assert set(noisy.tolist()) <= set(range(10))
    assert torch.equal(labels, torch.arange(200) % 10)  # its argument is unchanged


def test_other_classes_are_equally_likely():
    labels = torch.zeros(3000, dtype=torch.long)
    noisy = flip_labels(labels, fraction=1.0, num_classes=4, generator=torch.Generator().manual_seed(0))
    assert noisy.bincount(minlength=4)[0] == 0
    assert (noisy.bincount(minlength=4)[1:] - 1000).abs().max() < 100
