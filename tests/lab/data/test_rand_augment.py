"""Compared with Pillow, the reference for RandAugment's operations."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from sparsesam.lab.data.rand_augment import OPERATIONS, rand_augment

STRENGTH = 0.5


@pytest.fixture(scope="module")
def images():
    draws = torch.Generator().manual_seed(0)
    coarse = torch.randint(20, 220, (3, 3, 6, 6), generator=draws).float()
    smooth = torch.nn.functional.interpolate(coarse, size=(24, 24), mode="bilinear")
    return (smooth + 10 * torch.rand(smooth.shape, generator=draws)).to(torch.uint8)


def with_pillow(images, function):
    pictures = [function(Image.fromarray(image.permute(1, 2, 0).numpy())) for image in images]
    return torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in pictures]).float()


def ours(name, images, sign=1.0):
    return OPERATIONS[name](images.float(), STRENGTH, torch.full((len(images),), sign)).round().clamp(0, 255)


@pytest.mark.parametrize(
    ("name", "reference", "tolerance"),
    [
        ("identity", lambda image: image, 0),
        ("auto-contrast", ImageOps.autocontrast, 1),
        ("equalize", ImageOps.equalize, 0),
        ("solarize", lambda image: ImageOps.solarize(image, 128), 0),
        ("posterize", lambda image: ImageOps.posterize(image, 6), 0),
        ("color", lambda image: ImageEnhance.Color(image).enhance(1.45), 1),
        ("contrast", lambda image: ImageEnhance.Contrast(image).enhance(1.45), 1),
        ("brightness", lambda image: ImageEnhance.Brightness(image).enhance(1.45), 1),
        ("sharpness", lambda image: ImageEnhance.Sharpness(image).enhance(1.45), 1),
    ],
)
def test_colors_match_pillow(images, name, reference, tolerance):
    assert (ours(name, images) - with_pillow(images, reference)).abs().max() <= tolerance


@pytest.mark.parametrize(
    ("name", "matrix"),
    [
        ("shear-x", (1, 0.15, -0.15 * 12, 0, 1, 0)),
        ("shear-y", (1, 0, 0, 0.15, 1, -0.15 * 12)),
        ("translate-x", (1, 0, 0.165 * 24, 0, 1, 0)),
        ("translate-y", (1, 0, 0, 0, 1, 0.165 * 24)),
    ],
)
def test_shapes_match_pillow(images, name, matrix):
    expected = with_pillow(
        images, lambda image: image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    )
    inside = (slice(None), slice(None), slice(5, 19), slice(5, 19))
    assert (ours(name, images) - expected)[inside].abs().max() <= 2


def test_rotation_matches_pillow(images):
    expected = with_pillow(images, lambda image: image.rotate(15, Image.Resampling.BILINEAR))
    inside = (slice(None), slice(None), slice(5, 19), slice(5, 19))
    assert min((ours("rotate", images, sign) - expected)[inside].abs().max() for sign in (-1.0, 1.0)) <= 2


def test_images_have_own_operations_reproducible_by_seed(images):
    many = images[:1].expand(200, -1, -1, -1)
    first, again = (rand_augment(many, torch.Generator().manual_seed(1), count=1, magnitude=9) for _ in range(2))
    assert torch.equal(first, again)
    assert first.dtype == torch.uint8
    assert len(OPERATIONS) - 1 <= len(first.unique(dim=0)) <= 2 * len(OPERATIONS)


def test_gray_images_are_augmented(images):
    gray = images[:, :1]
    assert rand_augment(gray, torch.Generator().manual_seed(1), count=2, magnitude=9).shape == gray.shape
