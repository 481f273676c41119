"""Random crop, flip, cutout, mixup and normalization of whole batches, on the images' device.

Every function takes its random draws as tensors, one entry per image; `Augment` makes the draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from sparsesam.lab.data.image_folder import FolderSplits
from sparsesam.lab.data.splits import Splits


@dataclass(frozen=True)
class Augment:
    """Pad and crop, flip, normalize, cut out; operations set to 0 or False are skipped.

    ``images`` are (n, c, h, w), uint8 in 0..255 or floating point in [0, 1]; the result is float32, or the images' own
    floating-point dtype. Half of the images are mirrored, and half are cut: a square is filled with 0 after
    normalization, the data set's mean color. Its center is any pixel, so it may extend beyond the border, as in
    DeVries & Taylor (2017).
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    padding: int = 0
    flip: bool = False
    cutout: int = 0

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not all(value > 0 for value in self.std):
            raise ValueError(f"std must be positive, one per channel like mean, got {self.std} for mean {self.mean}")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Augment a training batch; draws come from ``generator``, which may be on any device."""
        count, _, height, width = images.shape

        def draw(low: int, high: int) -> Tensor:
            numbers = torch.randint(low, high, (count,), generator=generator, device=generator.device)
            return numbers.to(images.device, non_blocking=True)

        def happens() -> Tensor:
            numbers = torch.rand(count, generator=generator, device=generator.device)
            return (numbers < 0.5).to(images.device, non_blocking=True)

        if self.padding or self.flip:
            tops, lefts = (draw(0, 2 * self.padding + 1) for _ in range(2))
            flips = happens() if self.flip else None
            images = crop_and_flip(images, tops, lefts, flips, padding=self.padding)
        seen = self.plain(images)
        if self.cutout:
            half = self.cutout // 2
            tops, lefts = draw(-half, height - half), draw(-half, width - half)
            seen = cut_out_(seen, tops, lefts, happens(), size=self.cutout)
        return seen

    def plain(self, images: Tensor) -> Tensor:
        """Normalize a test batch without augmentation."""
        return normalize(images, self.mean, self.std)


def standard_augmentation(splits: Splits | FolderSplits, *, cutout: bool = True) -> Augment:
    """Returns the paper's augmentation; for 32x32 images: pad-4 crop, flip, cutout 16 with probability 0.5.

    Padding is an eighth and cutout half of the image's side. Images below 28 pixels are not cut, which would hide the
    object; data sets that are not ``mirrored`` are not flipped; images from folders are already cropped and flipped.
    The paper's experiments with noisy labels and corrupted images do not use cutout.
    """
    if isinstance(splits, FolderSplits):
        return Augment(splits.mean, splits.std)
    side = splits.image_size
    return Augment(
        splits.mean,
        splits.std,
        padding=round(side / 8),
        flip=splits.mirrored,
        cutout=side // 2 if cutout and side >= 28 else 0,
    )


def crop_and_flip(images: Tensor, tops: Tensor, lefts: Tensor, flips: Tensor | None, *, padding: int) -> Tensor:
    """Pad with zeros, take the (h, w) window at (top, left) of each padded image, mirror those with flip True.

    A row of a window is contiguous in memory, so one `index_select` copies whole rows, in a quarter of the time of
    indexing with tops and lefts. The mirror image of the window at ``left`` is the window at 2 padding - left of the
    mirrored image, which is in memory too.
    """
    count, channels, height, width = images.shape
    sides = 1 if flips is None else 2
    tall, wide = height + 2 * padding, width + 2 * padding
    padded = images.new_zeros(sides, count, channels, tall, wide)
    inside = padded[..., padding : padding + height, padding : padding + width]
    inside[0].copy_(images)
    starts = tops * wide + torch.arange(count, device=images.device) * (channels * tall * wide)
    if flips is None:
        starts = starts + lefts
    else:
        inside[1].copy_(images.flip(-1))
        starts = starts + torch.where(flips, padded[0].numel() + 2 * padding - lefts, lefts)
    planes = torch.arange(channels, device=images.device)[:, None] * (tall * wide)
    rows = planes + torch.arange(height, device=images.device) * wide
    windows = padded.as_strided((padded.numel() - width + 1, width), (1, 1))
    return windows.index_select(0, (starts[:, None] + rows.flatten()).flatten()).view(images.shape)


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x - mean) / std per channel, with x in [0, 1]: uint8 images are divided by 255."""
    top, dtype = (1.0, images.dtype) if images.is_floating_point() else (255.0, torch.float32)
    normalized = images.to(dtype, copy=True)
    for channel, m, s in zip(normalized.unbind(1), mean, std, strict=True):
        channel.mul_(1 / (top * s)).sub_(m / s)
    return normalized


def denormalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Undo `normalize` and return uint8 images for display."""
    scale, shift = (torch.tensor(values, device=images.device).view(-1, 1, 1) for values in (std, mean))
    return ((images.float() * scale + shift) * 255).round().clamp(0, 255).to(torch.uint8)


def cut_out_(images: Tensor, tops: Tensor, lefts: Tensor, chosen: Tensor, *, size: int) -> Tensor:
    """Zero rows top..top+size and columns left..left+size of the chosen images in place, clipped to the image."""

    def inside(starts: Tensor, length: int) -> Tensor:
        distance = torch.arange(length, device=starts.device) - starts[:, None]
        return ((distance >= 0) & (distance < size)).to(images.dtype)

    rows, columns = inside(tops, images.shape[2]) * chosen[:, None], inside(lefts, images.shape[3])
    cut = rows[:, None, :, None] * columns[:, None, None, :]
    return images.mul_(1 - cut)  # a quarter of the time of masked_fill_ on a CPU


def mixup(
    images: Tensor, labels: Tensor, *, alpha: float, num_classes: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Mixup (Zhang et al. 2018): lam x + (1 - lam) x' and lam y + (1 - lam) y', with one lam ~ Beta(alpha, alpha).

    ``labels`` are (n,) classes; the result's are (n, num_classes) probabilities, as `cross_entropy` takes them.
    """
    device = generator.device
    # Beta(a, a) from two Gamma(a) draws; torch.distributions does not take a generator.
    both = torch._standard_gamma(torch.full((2,), alpha, device=device, dtype=torch.float64), generator=generator)
    share = float(both[0] / both.sum()) if both.sum() > 0 else 1.0
    other = torch.randperm(len(labels), generator=generator, device=device).to(labels.device)
    targets = one_hot(labels, num_classes).to(images.dtype)
    return torch.lerp(images[other], images, share), torch.lerp(targets[other], targets, share)
