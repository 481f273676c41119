"""Cost of a step in SGD steps: ResNet-18 on CIFAR shapes, without mask refreshes.

python -m benchmarks.steps [--batch 64] [--rounds 11] [--warmup 2] [--threads 2]
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

import sparsesam
from benchmarks.cases import Case, Wrap, cifar_batch, pytorch_optimizer_sam, sam, ssam
from benchmarks.timing import arguments, begin, compare, format_ratios
from sparsesam.lab.models import resnet18


def main() -> None:
    parser = arguments(__doc__, batch=64, rounds=11, warmup=2, threads=2)
    options = begin(parser)
    if options.warmup < 1:
        parser.error(f"--warmup must be at least 1, got {options.warmup}: the masks are made in the warm-up")
    rows = compare(cases(options.batch), "SGD", options)
    print(f"ResNet-18, batch {options.batch}, {options.rounds} interleaved rounds")
    print(format_ratios(rows, "SGD"))


def cases(batch: int) -> dict[str, Case]:
    """Returns a step of each optimizer, each with its own copy of one model; masks are computed once and kept."""
    torch.manual_seed(0)
    model, data = resnet18(), cifar_batch(batch)
    fisher = sparsesam.fisher_mask(data, cross_entropy, sparsity=0.5, samples=min(16, batch))
    dynamic = sparsesam.dynamic_mask(sparsity=0.5, total_steps=10**6, refresh=None)
    wraps: dict[str, Wrap | None] = {
        "SGD": None,
        "SAM": sam,
        "SSAM-F 0.5": ssam(fisher, norm="full"),
        "SSAM-D 0.5": ssam(dynamic, norm="full"),
        "pytorch-optimizer SAM": pytorch_optimizer_sam,
    }
    return {name: Case(model, data, wrap) for name, wrap in wraps.items()}


if __name__ == "__main__":
    main()
