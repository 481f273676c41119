"""RandAugment (Cubuk et al. 2020) on batches of uint8 tensors, on the images' device.

For every image, ``count`` operations are drawn uniformly from the paper's fourteen and applied in sequence with one
magnitude in [0, 10]. The operations follow Pillow's, except that rotated, sheared and translated images are
interpolated bilinearly and padded with black.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

#: Takes floating-point images in 0..255, a strength in [0, 1] and a sign per image.
Operation = Callable[[Tensor, float, Tensor], Tensor]


def rand_augment(images: Tensor, generator: torch.Generator, *, count: int, magnitude: float) -> Tensor:
    """Apply ``count`` random operations to each of (n, c, h, w) uint8 images."""

    def draw(number: int) -> Tensor:
        return torch.rand(number, generator=generator, device=generator.device).to(images.device)

    for _ in range(count):
        chosen = (draw(len(images)) * len(OPERATIONS)).long()
        result = images.clone()
        for place, operation in enumerate(OPERATIONS.values()):
            mine = (chosen == place).nonzero()[:, 0]
            signs = torch.where(draw(len(mine)) < 0.5, -1.0, 1.0)
            if len(mine):
                changed = operation(images[mine].float(), magnitude / 10, signs)
                result[mine] = changed.round().clamp(0, 255).to(torch.uint8)
        images = result
    return images


def _auto_contrast(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Stretch each channel to 0..255; a constant channel is unchanged."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(high > low, (images - low) * 255 / (high - low).clamp_min(1), images)


def _equalize(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Replace each channel's values by 255 times their cumulative frequency, like Pillow's ImageOps.equalize."""
    values = images.long().flatten(2).flatten(0, 1)
    empty = torch.zeros(len(values), 256, device=images.device)
    histogram = empty.scatter_add_(1, values, torch.ones_like(values, dtype=empty.dtype))
    largest = histogram.gather(1, values.amax(1, keepdim=True))
    step = ((values.shape[1] - largest) / 255).floor()
    table = ((histogram.cumsum(1) - histogram + (step / 2).floor()) / step.clamp_min(1)).floor().clamp(0, 255)
    return torch.where(step > 0, table.gather(1, values), values.float()).view_as(images)


def _posterize(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Keep 8 to 4 bits of each value."""
    size = float(2 ** round(4 * strength))
    return (images / size).floor() * size


def _solarize(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Invert values at or above a threshold, 255 at strength 0."""
    return torch.where(images >= 255 * (1 - strength), 255 - images, images)


def _away_from(reference: Callable[[Tensor], Tensor]) -> Operation:
    """other + factor (images - other), with a factor of 1 ± 0.9 strength and other = ``reference(images)``."""

    def operation(images: Tensor, strength: float, signs: Tensor) -> Tensor:
        other = reference(images)
        return other + (1 + 0.9 * strength * signs).view(-1, 1, 1, 1) * (images - other)

    return operation


def _smooth(images: Tensor) -> Tensor:
    """Pillow's 3x3 smoothing; the border is unchanged."""
    kernel = torch.tensor([[1.0, 1.0, 1.0], [1.0, 5.0, 1.0], [1.0, 1.0, 1.0]], device=images.device) / 13
    smooth = images.clone()
    if min(images.shape[2:]) > 2:
        channels = images.shape[1]
        smooth[:, :, 1:-1, 1:-1] = F.conv2d(images, kernel.expand(channels, 1, 3, 3), groups=channels)
    return smooth


def _moved(largest: float, matrix: Callable[[Tensor], Sequence[float | Tensor]]) -> Operation:
    """Each output pixel (x, y) comes from (a x + b y + c, d x + e y + f), in units of half the side.

    ``matrix`` gives a to f for an amount of at most ``largest``.
    """

    def operation(images: Tensor, strength: float, signs: Tensor) -> Tensor:
        count, entries = len(images), matrix(largest * strength * signs)
        columns = [torch.as_tensor(entry, dtype=images.dtype, device=images.device).expand(count) for entry in entries]
        grid = F.affine_grid(torch.stack(columns, 1).view(count, 2, 3), list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, align_corners=False)

    return operation


def _gray(images: Tensor) -> Tensor:
    """Luminance (ITU-R 601) of color images, (n, 1, h, w); one-channel images are gray already."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    weights = torch.tensor([0.299, 0.587, 0.114], device=images.device).view(1, 3, 1, 1)
    return (images * weights).sum(1, keepdim=True)


OPERATIONS: dict[str, Operation] = {
    "identity": lambda images, strength, signs: images,
    "auto-contrast": _auto_contrast,
    "equalize": _equalize,
    "rotate": _moved(math.radians(30), lambda angle: (angle.cos(), -angle.sin(), 0, angle.sin(), angle.cos(), 0)),
    "solarize": _solarize,
    "color": _away_from(_gray),
    "posterize": _posterize,
    "contrast": _away_from(lambda images: _gray(images).mean((1, 2, 3), keepdim=True)),
    "brightness": _away_from(torch.zeros_like),
    "sharpness": _away_from(_smooth),
    "shear-x": _moved(0.3, lambda slope: (1, slope, 0, 0, 1, 0)),
    "shear-y": _moved(0.3, lambda slope: (1, 0, 0, slope, 1, 0)),
    "translate-x": _moved(0.33, lambda share: (1, 0, 2 * share, 0, 1, 0)),
    "translate-y": _moved(0.33, lambda share: (1, 0, 0, 0, 1, 2 * share)),
}
