"""What a step costs, in SGD steps: ResNet-18 on CIFAR shapes, refreshes not counted.

python -m benchmarks.steps [--batch 64] [--rounds 11] [--warmup 2] [--threads 2]
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sparsesam
from benchmarks.timing import format_ratios, interleaved, print_provenance, ratios
from sparsesam.lab.models import resnet18

Step = Callable[[], None]
SGD: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"batch": 64, "rounds": 11, "warmup": 2, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds; use with --threads 1")
    options = parser.parse_args()
    if options.warmup < 1:
        parser.error(f"--warmup must be at least 1, got {options.warmup}: the masks are made in the warm-up")
    torch.set_num_threads(options.threads)
    print_provenance()

    clock = time.process_time if options.cpu_time else time.perf_counter
    timed = interleaved(cases(options.batch), "SGD", rounds=options.rounds, warmup=options.warmup, clock=clock)
    print(f"ResNet-18, batch {options.batch}, {options.rounds} interleaved rounds")
    print(format_ratios(ratios(timed), "SGD"))


def cases(batch: int) -> dict[str, Step]:
    """A step of each optimizer, each with its own copy of one model; masks are made once and then kept."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (batch,), generator=generator)
    torch.manual_seed(0)
    start = resnet18()
    never = sparsesam.manual()
    masks: dict[str, sparsesam.MaskRule | None] = {
        "SAM": None,
        "SSAM-F 0.5": sparsesam.fisher_mask(
            (images, labels), cross_entropy, sparsity=0.5, samples=min(16, batch), refresh=never
        ),
        "SSAM-D 0.5": sparsesam.dynamic_mask(sparsity=0.5, total_steps=10**6, refresh=never),
    }
    steps = {"SGD": sgd(copy.deepcopy(start), images, labels)}
    steps |= {name: ours(copy.deepcopy(start), images, labels, mask) for name, mask in masks.items()}
    steps["pytorch-optimizer SAM"] = pytorch_optimizer_sam(copy.deepcopy(start), images, labels)
    return steps


def sgd(model: nn.Module, images: Tensor, labels: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    closure = closure_of(model, optimizer, images, labels)
    return lambda: void(optimizer.step(closure))


def ours(model: nn.Module, images: Tensor, labels: Tensor, mask: sparsesam.MaskRule | None) -> Step:
    base = torch.optim.SGD(model.parameters(), **SGD)
    optimizer = sparsesam.SAM(base, model, rho=0.1) if mask is None else sparsesam.SSAM(base, model, rho=0.1, mask=mask)
    closure = closure_of(model, optimizer, images, labels)
    return lambda: void(optimizer.step(closure))


def pytorch_optimizer_sam(model: nn.Module, images: Tensor, labels: Tensor) -> Step:
    """Their contract: the first pass before step(), the second in its closure."""
    from pytorch_optimizer import SAM

    optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.1, **SGD)
    closure = closure_of(model, optimizer, images, labels)

    def run() -> None:
        closure()
        optimizer.step(closure)

    return run


def closure_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> Callable[[], float]:
    def closure() -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        return loss.item()

    return closure


def void(_: object) -> None:
    """Forget a result: a timed case returns nothing."""


if __name__ == "__main__":
    main()
