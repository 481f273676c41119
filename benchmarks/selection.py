"""Time of mask selection: python -m benchmarks.selection [--rounds 7] [--largest 200]

The methods of one table are interleaved, and the median over the rounds is shown. Scores have the tensor
shapes of ResNet-18 (CIFAR stem, 11.17 M weights), repeated for the larger sizes, up to ``--largest`` million weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.timing import arguments, begin, medians
from sparsesam.lab.models import resnet18
from sparsesam.masks.patterns import NM, NMFilters, Structured, Unstructured
from sparsesam.masks.select import random_scores, top_mask

Scores = dict[str, Tensor]


def squared_gaussians(generator: torch.Generator, *, copies: int = 1, zeros: float = 0.0) -> Scores:
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in resnet18().named_parameters()}
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
    entries = np.concatenate([np.compress(among[name].view(-1), one.view(-1)) for name, one in scores.items()])
    place = len(entries) - count
    entries.partition(place)
    threshold = float(entries[place])
    return {name: (one >= threshold).logical_and_(among[name]) for name, one in scores.items()}


def simple_drop_and_grow(masks: Mapping[str, Tensor], keep: Scores, generator: torch.Generator) -> Scores:
    kept = sum(int(mask.count_nonzero()) for mask in masks.values())
    left = partition_of_everything(keep, kept // 2, masks)
    free = {name: ~mask for name, mask in left.items()}
    grown = partition_of_everything(random_scores(keep, generator=generator), kept - kept // 2, free)
    return {name: mask.logical_or_(left[name]) for name, mask in grown.items()}


def show(title: str, times: Mapping[str, float], size: int, *, against: str | None = None) -> None:
    print(f"\n{title}")
    for name, seconds in times.items():
        ratio = f"{times[against] / seconds:8.1f} x" if against else ""
        print(f"  {name:44s} {1e3 * seconds:9.1f} ms {1e9 * seconds / size:7.2f} ns/weight {ratio}")


def main() -> None:
    options = begin(arguments(__doc__, rounds=7, largest=200, threads=2))
    print(f"medians of {options.rounds} interleaved rounds")
    generator = torch.Generator().manual_seed(0)

    plain = squared_gaussians(generator)
    size = sum(score.numel() for score in plain.values())
    everything = {name: torch.ones_like(score, dtype=torch.bool) for name, score in plain.items()}
    for title, scores in (
        ("squared gaussians", plain),
        ("30 % zeros", squared_gaussians(generator, zeros=0.3)),
    ):
        contenders: dict[str, Callable[[], object]] = {
            "torch.topk of the concatenation": partial(topk_of_concatenation, scores, size // 2),
            "the same, sorted=False": partial(topk_of_concatenation, scores, size // 2, ordered=False),
            "np.partition of all scores": partial(partition_of_everything, scores, size // 2, everything),
            "top_mask": partial(top_mask, scores, size // 2),
        }
        times = medians(contenders, options.rounds, options.clock)
        show(f"top half of {size:,} scores, {title}", times, size, against="torch.topk of the concatenation")

    entries, two_of_four, filters = Unstructured(), NM(2, 4), Structured("filter")
    masks, keep = entries.select(plain, 0.5), squared_gaussians(generator)
    drop_and_grow = partial(entries.drop_and_grow, sparsity=0.5, ratio=0.5)
    contenders = {
        "Unstructured drop_and_grow, random growth": partial(drop_and_grow, masks, keep, generator),
        "the same by np.partition of all scores": partial(simple_drop_and_grow, masks, keep, generator),
        "Unstructured drop_and_grow, growth by score": partial(drop_and_grow, masks, keep, plain),
        "Unstructured draw": partial(entries.draw, plain, generator, 0.5),
        "random_scores": partial(random_scores, plain, generator=generator),
        "2:4 select": partial(two_of_four.select, plain),
        "2:4 input select": partial(NM(2, 4, axis="input").select, plain),
        "2:4 filters select": partial(NMFilters(2, 4).select, plain),
        "filter select": partial(filters.select, plain, 0.5),
        "column select": partial(Structured("column").select, plain, 0.5),
        "tensor select": partial(Structured("tensor").select, plain, 0.5),
        "2:4 drop_and_grow, random growth": partial(
            two_of_four.drop_and_grow, two_of_four.select(plain), keep, generator, ratio=0.5
        ),
        "filter drop_and_grow, random growth": partial(
            filters.drop_and_grow, filters.select(plain, 0.5), keep, generator, sparsity=0.5, ratio=0.5
        ),
    }
    show(f"{size:,} weights, sparsity 0.5, ratio 0.5", medians(contenders, options.rounds, options.clock), size)

    units = {f"p{i}": torch.rand(10_000, 1 + i % 7, generator=generator) for i in range(100)}
    number = sum(score.numel() for score in units.values())
    times = medians({"filter select": partial(filters.select, units, 0.5)}, options.rounds, options.clock)
    show("1,000,000 filters of seven sizes", times, number)

    for millions in (11, 50, 200):
        if millions > options.largest:
            continue
        scores = squared_gaussians(generator, copies=max(1, round(millions * 1e6 / size)))
        total = sum(score.numel() for score in scores.values())
        masks = top_mask(scores, total // 2)
        contenders = {
            "top_mask": partial(top_mask, scores, total // 2),
            "Unstructured drop_and_grow, random growth": partial(drop_and_grow, masks, scores, generator),
        }
        times = medians(contenders, max(3, options.rounds // 2), options.clock)
        show(f"growth with size: {total:,} weights", times, total)


if __name__ == "__main__":
    main()
