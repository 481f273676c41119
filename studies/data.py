"""The studies' data sets, each as a function for ``sparsesam train --dataset studies.data:NAME``.

``NAME_validation``, used to tune strengths, and ``NAME_test``, evaluated once, have the same training images. Their
test images are disjoint.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from sparsesam.lab.data import Labelled, Splits, load_dataset

#: Directory of Debian's package dataset-fashion-mnist.
_FASHION = Path("/usr/share/datasets/fashion-mnist")


def _digits(data_dir: Path | None, *, final: bool) -> Splits:
    """Returns 1000 digits for training; of the other 797, the first 297 for validation or 500 for the test."""
    whole = load_dataset("digits")
    assert isinstance(whole, Splits)
    order = _order(len(whole.test.labels))
    chosen = order[297:] if final else order[:297]
    return replace(whole, test=Labelled(*(tensor[chosen] for tensor in whole.test)))


def _fashion(data_dir: Path | None, *, final: bool) -> Splits:
    place = data_dir or (_FASHION if _FASHION.is_dir() else None)
    return _subset(_half_size("fashion-mnist", place), train=1500, validation=2000, final=final)


def _cifar(data_dir: Path | None, *, final: bool) -> Splits:
    return _subset(_half_size("cifar10", data_dir), train=5000, validation=5000, final=final)


digits_validation, digits_test = partial(_digits, final=False), partial(_digits, final=True)
fashion_validation, fashion_test = partial(_fashion, final=False), partial(_fashion, final=True)
cifar_validation, cifar_test = partial(_cifar, final=False), partial(_cifar, final=True)


def _subset(whole: Splits, *, train: int, validation: int, final: bool) -> Splits:
    """Returns the first ``train`` training images in a fixed order, and the next ``validation`` or the test images."""
    order = _order(len(whole.train.labels))
    chosen, held_out = order[:train], order[train : train + validation]
    test = whole.test if final else Labelled(*(tensor[held_out] for tensor in whole.train))
    return replace(whole, train=Labelled(*(tensor[chosen] for tensor in whole.train)), test=test)


@cache
def _half_size(name: str, data_dir: Path | None) -> Splits:
    """Returns means of 2x2 pixels: a quarter of the work per image, so that a study has enough seeds."""
    whole = load_dataset(name, data_dir)
    assert isinstance(whole, Splits)
    return replace(
        whole,
        train=Labelled(_pooled(whole.train.images), whole.train.labels),
        test=Labelled(_pooled(whole.test.images), whole.test.labels),
    )


def _pooled(images: Tensor) -> Tensor:
    return torch.cat([avg_pool2d(part.float(), 2).round().to(torch.uint8) for part in images.split(5000)])


def _order(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))
