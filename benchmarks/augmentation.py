"""Cost of augmentation: CIFAR batches as tensors, against single images with Pillow."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from benchmarks.runner import Session, benchmark
from benchmarks.timing import show
from sparsesam.lab.data import Augment

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
OURS = "batch of tensors"


@benchmark(rounds=31, threads=1, quick={"batch": 8})
def augmentation(session: Session, *, batch: int = 128) -> None:
    """How fast is the augmentation of a batch, against Pillow image by image?

    Both crop (padding 4), flip, convert to a normalized float tensor and cut out 16x16 with probability 0.5. The
    images are random numbers, as the cost does not depend on the content.
    """
    ratios = session.compare(cases(batch), OURS)
    rows = [(name, f"{batch / ratio.seconds:,.0f}", ratio) for name, ratio in ratios.items()]
    show(f" | images/s | x {OURS}", rows)


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

    return {OURS: ours, "image by image, Pillow": pillow}


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
