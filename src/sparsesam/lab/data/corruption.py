"""Wrong labels, and the paper's four image corruptions; the paper does not give their strengths, so these are ours.

Images, labels and generators are on the CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 4096
"""Images corrupted at a time, to keep the floating-point copy small."""


def gaussian_noise(images: Tensor, generator: torch.Generator) -> Tensor:
    """x + ε, with ε ~ N(0, 0.1²) for each pixel and channel."""
    return images + 0.1 * torch.randn(images.shape, generator=generator)


def resolution(images: Tensor, generator: torch.Generator) -> Tensor:
    """Downsample to half the side by 2x2 means, and upsample again bilinearly."""
    height, width = images.shape[-2:]
    small = (max(1, height // 2), max(1, width // 2))
    return F.interpolate(F.adaptive_avg_pool2d(images, small), size=(height, width), mode="bilinear")


def fog(images: Tensor, generator: torch.Generator) -> Tensor:
    """(1 - t) x + t A: light A = 0.9 and haze of thickness t, a plasma fractal from 0.3 to 0.85."""
    haze = plasma(len(images), images.shape[-2], images.shape[-1], generator)
    thickness = 0.3 + (0.85 - 0.3) * haze[:, None]
    return images + thickness * (0.9 - images)


def occlusion(images: Tensor, generator: torch.Generator) -> Tensor:
    """A black rectangle of half the height and half the width in the center: a quarter of the image."""
    height, width = images.shape[-2:]
    top, left = height // 4, width // 4
    covered = images.clone()
    covered[:, :, top : top + round(height / 2), left : left + round(width / 2)] = 0
    return covered


CORRUPTIONS = {"gaussian-noise": gaussian_noise, "resolution": resolution, "fog": fog, "occlusion": occlusion}
"""Corruptions by name, for floating-point images in [0, 1]; results are clamped to that range."""


def corrupt(images: Tensor, rate: float, kind: str, generator: torch.Generator) -> Tensor:
    """Returns a copy of (n, c, h, w) uint8 images in which round(rate * n) are corrupted, chosen uniformly.

    ``kind`` is a name in `CORRUPTIONS`, or "mixed": equally many of each, to within one.
    """
    names, count = list(CORRUPTIONS), round(rate * len(images))
    chosen = torch.randperm(len(images), generator=generator)[:count]
    kinds = torch.full((len(images),), -1)  # indices of CORRUPTIONS; -1: unchanged
    kinds[chosen] = torch.arange(count) % len(names) if kind == "mixed" else torch.tensor(names.index(kind))
    corrupted = images.clone()
    for place, function in enumerate(CORRUPTIONS.values()):
        for part in (kinds == place).nonzero()[:, 0].split(CHUNK):
            changed = function(images[part] / 255, generator)
            corrupted[part] = changed.mul(255).round_().clamp_(0, 255).to(torch.uint8)
    return corrupted


def plasma(count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Returns (count, height, width) smooth random fields in [0, 1]: sums of random grids of increasing resolution."""
    field = torch.zeros(count, 1, height, width)
    cells, weight = 2, 1.0
    while cells < max(height, width):
        grid = torch.rand(count, 1, cells, cells, generator=generator)
        field += weight * F.interpolate(grid, size=(height, width), mode="bicubic", align_corners=True)
        cells, weight = 2 * cells, weight / 2
    low, high = field.amin((2, 3), keepdim=True), field.amax((2, 3), keepdim=True)
    return ((field - low) / (high - low).clamp_min(1e-12))[:, 0]


def flip_labels(labels: Tensor, fraction: float, num_classes: int, generator: torch.Generator) -> Tensor:
    """Label noise: returns a copy of (n,) integer labels with round(fraction * n) changed to a different class.

    The labels and their new classes are drawn uniformly: symmetric noise, in which a changed label is always wrong.
    """
    count = round(fraction * len(labels))
    chosen = torch.randperm(len(labels), generator=generator)[:count]
    shift = torch.randint(1, num_classes, (count,), generator=generator)
    flipped = labels.clone()
    flipped[chosen] = (labels[chosen] + shift) % num_classes
    return flipped
