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
from sparsesam.masks.patterns import NM, Structured, Unstructured
from sparsesam.masks.select import random_scores, top_mask

Scores = dict[str, Tensor]


def squared_gaussians(model: str, generator: torch.Generator, *, copies: int = 1, zeros: float = 0.0) -> Scores:
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in build_model(model).named_parameters()}
    scores = {}
    for copy in range(copies):
        for name, shape in shapes.items():
            score = torch.randn(shape, generator=generator).square_()
            if zeros:
                score[torch.rand(shape, generator=generator) < zeros] = 0
            scores[f"{copy}.{name}"] = score
    return scores


def topk_of_concatenation(scores: Mapping[str, Tensor], count: int, *, ordered: bool = True) -> Scores:
    """The naive implementation: concatenate, torch.topk, scatter, split."""
    flat = torch.cat([score.reshape(-1) for score in scores.values()])
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[flat.topk(count, sorted=ordered).indices] = True
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


def table(title: str, times: Mapping[str, float], size: int) -> None:
    """Prints times of selections among ``size`` weights, and how much faster each is than the first."""
    first = next(iter(times.values()))
    rows = [
        (name, f"{1e3 * seconds:.1f}", f"{1e9 * seconds / size:.2f}", f"{first / seconds:.1f}")
        for name, seconds in times.items()
    ]
    show(f"{title} | ms | ns/weight | x as fast as the first", rows)


@benchmark(rounds=7, quick={"model": "resnet10-small", "millions": (1,), "units": 10})
def selection(
    session: Session,
    *,
    model: str = "resnet18",
    millions: tuple[int, ...] = (11, 50, 200),
    units: int = 10_000,
) -> None:
    """How long does it take to select a mask, against torch.topk and np.partition, and with more weights?

    --millions are the numbers of weights of the last tables, --units a hundredth of the number of filters.
    """
    generator = torch.Generator().manual_seed(0)
    scores_of = partial(squared_gaussians, model, generator)
    plain = scores_of()
    size = sum(score.numel() for score in plain.values())
    everything = {name: torch.ones_like(score, dtype=torch.bool) for name, score in plain.items()}
    contenders: dict[str, Callable[[], object]]
    for title, scores in (("squared gaussians", plain), ("30 % zeros", scores_of(zeros=0.3))):
        contenders = {
            "torch.topk of the concatenation": partial(topk_of_concatenation, scores, size // 2),
            "the same, sorted=False": partial(topk_of_concatenation, scores, size // 2, ordered=False),
            "np.partition of all scores": partial(partition_of_everything, scores, size // 2, everything),
            "top_mask": partial(top_mask, scores, size // 2),
        }
        table(f"top half of {size:,} scores, {title}", session.medians(contenders), size)

    entries, two_of_four, filters = Unstructured(), NM(2, 4), Structured("filter")
    masks, keep = entries.select(plain, 0.5), scores_of()
    drop_and_grow = partial(entries.drop_and_grow, sparsity=0.5, ratio=0.5)
    of_filters = partial(filters.drop_and_grow, filters.select(plain, 0.5), keep, generator, sparsity=0.5, ratio=0.5)
    contenders = {
        "Unstructured drop_and_grow, random growth": partial(drop_and_grow, masks, keep, generator),
        "the same by np.partition of all scores": partial(simple_drop_and_grow, masks, keep, generator),
        "Unstructured drop_and_grow, growth by score": partial(drop_and_grow, masks, keep, plain),
        "Unstructured draw": partial(entries.draw, plain, generator, 0.5),
        "random_scores": partial(random_scores, plain, generator=generator),
        "2:4 select": partial(two_of_four.select, plain),
        "2:4 input select": partial(NM(2, 4, axis="input").select, plain),
        "2:4 filters select": partial(NM(2, 4, axis="filters").select, plain),
        "filter select": partial(filters.select, plain, 0.5),
        "column select": partial(Structured("column").select, plain, 0.5),
        "tensor select": partial(Structured("tensor").select, plain, 0.5),
        "2:4 drop_and_grow, random growth": partial(
            two_of_four.drop_and_grow, two_of_four.select(plain), keep, generator, ratio=0.5
        ),
        "filter drop_and_grow, random growth": of_filters,
    }
    table(f"{size:,} weights, sparsity 0.5, ratio 0.5", session.medians(contenders), size)

    many = {f"p{i}": torch.rand(units, 1 + i % 7, generator=generator) for i in range(100)}
    times = session.medians({"filter select": partial(filters.select, many, 0.5)})
    table(f"{100 * units:,} filters of seven sizes", times, sum(score.numel() for score in many.values()))

    for number in millions:
        scores = scores_of(copies=max(1, round(number * 1e6 / size)))
        total = sum(score.numel() for score in scores.values())
        contenders = {
            "top_mask": partial(top_mask, scores, total // 2),
            "Unstructured drop_and_grow, random growth": partial(
                drop_and_grow, top_mask(scores, total // 2), scores, generator
            ),
        }
        table(f"growth with size: {total:,} weights", session.medians(contenders), total)
