"""Scikit-learn's 8x8 handwritten digits: real images, no download."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsesam.lab.data.noise import flip_labels
from sparsesam.lab.data.splits import Labelled, Splits

TRAIN_SIZE = 1000


def digits_splits() -> Splits:
    """The split of `load_digits_split` with true labels, pixels scaled from 0..16 to 0..255."""
    train_x, train_y, test_x, test_y = load_digits_split(flip=0.0)
    return Splits(
        train=Labelled(_bytes(train_x), train_y),
        test=Labelled(_bytes(test_x), test_y),
        name="digits",
        classes=tuple("0123456789"),
        mean=(0.3049,),
        std=(0.3754,),
        mirrored=False,
    )


def _bytes(images: Tensor) -> Tensor:
    return (images * 255).round().to(torch.uint8)


def load_digits_split(flip: float = 0.3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train images, train labels, test images and test labels: 1000 and 797 digits, stratified by class.

    Images are (n, 1, 8, 8) float32 in [0, 1]. ``flip`` is the fraction of *training* labels changed to a
    different class; test labels are always true. ``seed`` decides both the split and the flips.
    """
    if not 0 <= flip <= 1:
        raise ValueError(f"flip must be in [0, 1], got {flip}; 0 keeps every training label, 1 changes all")
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ImportError("the digits need scikit-learn: pip install 'sparsesam[data]'") from error
    pixels, labels = load_digits(return_X_y=True)
    split = train_test_split(pixels, labels, train_size=TRAIN_SIZE, stratify=labels, random_state=seed)
    train_x, test_x = (torch.tensor(part, dtype=torch.float32).view(-1, 1, 8, 8) / 16 for part in split[:2])
    train_y, test_y = (torch.tensor(part, dtype=torch.long) for part in split[2:])
    generator = torch.Generator().manual_seed(seed)
    return train_x, flip_labels(train_y, fraction=flip, num_classes=10, generator=generator), test_x, test_y
