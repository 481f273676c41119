"""Time of mask selection, on scores with the tensor shapes of ResNet-18 (CIFAR stem, 11.17 M weights)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.runner import Session, benchmark
from benchmarks.timing import show
from sparsesam.lab.models import build_model
from sparsesam.masks.patterns import Unstructured
from sparsesam.masks.select import random_scores, top_mask

Scores = dict[str, Tensor]


def squared_gaussians(model: str, generator: torch.Generator, *, zeros: float = 0.0) -> Scores:
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in build_model(model).named_parameters()}
    scores = {name: torch.randn(shape, generator=generator).square_() for name, shape in shapes.items()}
    for score in scores.values() if zeros else ():
        score[torch.rand(score.shape, generator=generator) < zeros] = 0
    return scores


def topk_of_concatenation(scores: Mapping[str, Tensor], count: int) -> Scores:
    """The naive implementation: concatenate, torch.topk, scatter, split."""
    flat = torch.cat([score.reshape(-1) for score in scores.values()])
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[flat.topk(count).indices] = True
    parts = torch.split(mask, [score.numel() for score in scores.values()])
    return {name: part.view(scores[name].shape) for name, part in zip(scores, parts, strict=True)}


def partition_of_everything(scores: Mapping[str, Tensor], count: int, among: Mapping[str, Tensor]) -> Scores:
    """The simple form of top_mask: np.partition of all allowed scores gives the threshold. Ties are not resolved."""
    entries = np.concatenate([np.compress(among[name].view(-1), score.view(-1)) for name, score in scores.items()])
    place = len(entries) - count
    entries.partition(place)
    threshold = float(entries[place])
    return {name: (score >= threshold).logical_and_(among[name]) for name, score in scores.items()}


def simple_drop_and_grow(masks: Mapping[str, Tensor], keep: Scores, generator: torch.Generator) -> Scores:
    kept = sum(int(mask.count_nonzero()) for mask in masks.values())
    left = partition_of_everything(keep, kept // 2, masks)
    free = {name: ~mask for name, mask in left.items()}
    grown = partition_of_everything(random_scores(keep, generator=generator), kept - kept // 2, free)
    return {name: mask.logical_or_(left[name]) for name, mask in grown.items()}


@benchmark(rounds=7, quick={"model": "resnet10-small"})
def selection(session: Session, *, model: str = "resnet18") -> None:
    """How long does it take to select a mask, against torch.topk and np.partition?"""
    generator = torch.Generator().manual_seed(0)
    plain, keep = squared_gaussians(model, generator), squared_gaussians(model, generator)
    size = sum(score.numel() for score in plain.values())
    everything = {name: torch.ones_like(score, dtype=torch.bool) for name, score in plain.items()}
    tables: dict[str, dict[str, Callable[[], object]]] = {}
    for title, scores in (("scores", plain), ("scores, 30 % zeros", squared_gaussians(model, generator, zeros=0.3))):
        tables[f"top half of {size:,} {title}"] = {
            "torch.topk of the concatenation": partial(topk_of_concatenation, scores, size // 2),
            "np.partition of all scores": partial(partition_of_everything, scores, size // 2, everything),
            "top_mask": partial(top_mask, scores, size // 2),
        }
    entries = Unstructured()
    masks = entries.select(plain, 0.5)
    tables["drop and growth of SSAM-D"] = {
        "np.partition of all scores": partial(simple_drop_and_grow, masks, keep, generator),
        "drop_and_grow": partial(entries.drop_and_grow, masks, keep, generator, sparsity=0.5, ratio=0.5),
    }
    for title, contenders in tables.items():
        times = session.medians(contenders)
        first = next(iter(times.values()))
        rows = [(name, f"{1e3 * seconds:.1f}", f"{first / seconds:.1f}") for name, seconds in times.items()]
        show(f"{title} | ms | x as fast as the first", rows)
