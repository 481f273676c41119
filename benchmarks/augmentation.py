"""Cost of augmentation: CIFAR batches as tensors, against single images with Pillow, on one core.

python -m benchmarks.augmentation [--batch 128] [--rounds 31] [--warmup 3] [--threads 1]

Both crop (padding 4), flip, convert to a normalized float tensor and cut out 16x16 with probability 0.5. The images are
random numbers, as the cost does not depend on the content. A training step of a small network is timed first, for
comparison: augmentation must not limit training.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from benchmarks.cases import Case, cifar_batch
from benchmarks.timing import arguments, begin, compare, format_ratios, medians
from sparsesam.lab.data import Augment
from sparsesam.lab.models import build_model

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
OURS, PILLOW = "batch of tensors", "image by image, Pillow"
LIGHT_MODEL = "resnet10-small"


def main() -> None:
    options = begin(arguments(__doc__, batch=128, rounds=31, warmup=3, threads=1))
    # First, so that the memory allocator is in the same state as in training.
    torch.manual_seed(0)
    step = Case(build_model(LIGHT_MODEL), cifar_batch(options.batch))
    alone = medians({f"SGD step of {LIGHT_MODEL}": step}, 3, options.clock)
    rows = compare(cases(options.batch), OURS, options)
    print(f"batch {options.batch}, {options.rounds} interleaved rounds")
    print(format_ratios(rows, OURS))
    for name, seconds in (alone | {row.name: row.seconds for row in rows}).items():
        print(f"{options.batch / seconds:10,.0f} images/s  {name}")


def cases(batch: int) -> dict[str, Callable[[], None]]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (batch, 3, 32, 32), dtype=torch.uint8, generator=generator)
    augment = Augment(MEAN, STD, padding=4, flip=True, cutout=16)
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy().copy()) for image in images]
    draws = random.Random(0)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))

    def ours() -> None:
        augment(images, generator)

    def pillow() -> None:
        torch.stack([pillow_view(picture, draws, mean, std) for picture in pictures])

    return {OURS: ours, PILLOW: pillow}


def pillow_view(picture: Image.Image, draws: random.Random, mean: Tensor, std: Tensor) -> Tensor:
    """The same pipeline, in the order and with the operations of the usual per-image transforms."""
    padded = ImageOps.expand(picture, border=4, fill=0)
    left, top = draws.randrange(9), draws.randrange(9)
    seen = padded.crop((left, top, left + 32, top + 32))
    if draws.random() < 0.5:
        seen = seen.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    tensor = torch.from_numpy(np.array(seen)).permute(2, 0, 1).contiguous().float().div_(255)
    tensor.sub_(mean).div_(std)
    if draws.random() < 0.5:
        left, top = draws.randrange(-8, 24), draws.randrange(-8, 24)
        tensor[:, max(0, top) : top + 16, max(0, left) : left + 16] = 0
    return tensor


if __name__ == "__main__":
    main()
