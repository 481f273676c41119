"""Time the selection of masks: python benchmarks/selection.py [--rounds 7] [--largest 200]

Contenders of one table are interleaved, and the median over the rounds is shown. Scores have the tensor
shapes of ResNet-18 (CIFAR stem, 11.17 M weights), repeated for the larger sizes.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sparsesam.masks.patterns import NM, NMFilters, Structured, Unstructured
from sparsesam.masks.select import random_scores, top_mask

Scores = dict[str, Tensor]


def resnet18_shapes() -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    channels = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(width, channels, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            if block == 0 and width != channels:
                shapes += [(width, channels, 1, 1), (width,), (width,)]
            channels = width
    return [*shapes, (10, 512), (10,)]


def squared_gaussians(generator: torch.Generator, *, copies: int = 1, zeros: float = 0.0) -> Scores:
    scores = {}
    for copy in range(copies):
        for i, shape in enumerate(resnet18_shapes()):
            score = torch.randn(shape, generator=generator).square_()
            if zeros:
                score[torch.rand(shape, generator=generator) < zeros] = 0
            scores[f"{copy}.{i}"] = score
    return scores


def topk_of_concatenation(scores: Mapping[str, Tensor], count: int, *, ordered: bool = True) -> Scores:
    """What one writes first: concatenate, torch.topk, scatter, split."""
    flat = torch.cat([score.reshape(-1) for score in scores.values()])
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[flat.topk(count, sorted=ordered).indices] = True
    parts = torch.split(mask, [score.numel() for score in scores.values()])
    return {name: part.view(scores[name].shape) for name, part in zip(scores, parts, strict=True)}


def medians(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, after one warm-up, in interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(rounds + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if round_number:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def show(title: str, times: Mapping[str, float], size: int, *, against: str | None = None) -> None:
    print(f"\n{title}")
    for name, seconds in times.items():
        ratio = f"{times[against] / seconds:8.1f} x" if against else ""
        print(f"  {name:44s} {1e3 * seconds:9.1f} ms {1e9 * seconds / size:7.2f} ns/weight {ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--largest", type=int, default=200, help="largest number of weights, in millions")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    versions = f"torch {torch.__version__}, numpy {np.__version__}, {platform.machine()}"
    print(f"{versions}, 2 threads, medians of {arguments.rounds} interleaved rounds")
    generator = torch.Generator().manual_seed(0)

    plain = squared_gaussians(generator)
    size = sum(score.numel() for score in plain.values())
    for title, scores in (
        ("squared gaussians", plain),
        ("30 % zeros", squared_gaussians(generator, zeros=0.3)),
    ):
        contenders: dict[str, Callable[[], object]] = {
            "torch.topk of the concatenation": partial(topk_of_concatenation, scores, size // 2),
            "the same, sorted=False": partial(topk_of_concatenation, scores, size // 2, ordered=False),
            "top_mask": partial(top_mask, scores, size // 2),
        }
        times = medians(contenders, arguments.rounds)
        show(f"top half of {size:,} scores, {title}", times, size, against="torch.topk of the concatenation")

    masks = Unstructured().select(plain, 0.5)
    keep = squared_gaussians(generator)
    contenders = {
        "Unstructured drop_and_grow, random growth": lambda: Unstructured().drop_and_grow(
            masks, keep, generator, sparsity=0.5, ratio=0.5
        ),
        "Unstructured drop_and_grow, growth by score": lambda: Unstructured().drop_and_grow(
            masks, keep, plain, sparsity=0.5, ratio=0.5
        ),
        "Unstructured draw": lambda: Unstructured().draw(plain, generator, 0.5),
        "random_scores": lambda: random_scores(plain, generator=generator),
        "2:4 select": lambda: NM(2, 4).select(plain),
        "2:4 input select": lambda: NM(2, 4, axis="input").select(plain),
        "2:4 filters select": lambda: NMFilters(2, 4).select(plain),
        "filter select": lambda: Structured("filter").select(plain, 0.5),
        "column select": lambda: Structured("column").select(plain, 0.5),
        "tensor select": lambda: Structured("tensor").select(plain, 0.5),
    }
    two_of_four, filters = NM(2, 4).select(plain), Structured("filter").select(plain, 0.5)
    contenders["2:4 drop_and_grow, random growth"] = lambda: NM(2, 4).drop_and_grow(
        two_of_four, keep, generator, ratio=0.5
    )
    contenders["filter drop_and_grow, random growth"] = lambda: Structured("filter").drop_and_grow(
        filters, keep, generator, sparsity=0.5, ratio=0.5
    )
    show(f"{size:,} weights, sparsity 0.5, ratio 0.5", medians(contenders, arguments.rounds), size)

    units = {f"p{i}": torch.rand(10_000, 1 + i % 7, generator=generator) for i in range(100)}
    number = sum(score.numel() for score in units.values())
    run = {"filter select": lambda: Structured("filter").select(units, 0.5)}
    show("1,000,000 filters of seven sizes", medians(run, arguments.rounds), number)

    for millions in (11, 50, 200):
        if millions > arguments.largest:
            continue
        scores = squared_gaussians(generator, copies=max(1, round(millions * 1e6 / size)))
        total = sum(score.numel() for score in scores.values())
        half = top_mask(scores, total // 2)
        contenders = {
            "top_mask": partial(top_mask, scores, total // 2),
            "Unstructured drop_and_grow, random growth": partial(
                Unstructured().drop_and_grow, half, scores, generator, sparsity=0.5, ratio=0.5
            ),
        }
        show(f"growth with size: {total:,} weights", medians(contenders, max(3, arguments.rounds // 2)), total)


if __name__ == "__main__":
    main()
