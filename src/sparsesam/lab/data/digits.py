"""Scikit-learn's 8x8 handwritten digits: real images, no download."""

from __future__ import annotations

import torch

from sparsesam.integrations.extras import required_by
from sparsesam.lab.data.splits import Labelled, Splits


def load_digits() -> Splits:
    """1000 training and 797 test digits, stratified by class; pixels scaled from 0..16 to 0..255."""
    with required_by("the data set digits", "'sparsesam[data]'"):
        from sklearn import datasets
        from sklearn.model_selection import train_test_split
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = (torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16 * 255).round().to(torch.uint8)
    places = train_test_split(range(len(labels)), train_size=1000, stratify=labels, random_state=0)
    train, test = (Labelled(images[chosen], torch.tensor(labels[chosen])) for chosen in places)
    return Splits(
        train=train,
        test=test,
        name="digits",
        classes=tuple("0123456789"),
        mean=(0.3049,),
        std=(0.3754,),
        mirrored=False,
    )
