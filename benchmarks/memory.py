"""Peak memory of a step beyond the base optimizer's own, in bytes per parameter.

python -m benchmarks.memory [--threads 2]

A perceptron with one sample, where every temporary of the optimizer shows, and ResNet-18 with eight, where
activations hide some. A step that also makes a new mask is given apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sparsesam
from benchmarks.live_bytes import LiveBytes
from benchmarks.timing import print_provenance
from sparsesam.lab.models import resnet18

SPARSITIES = (0.5, 0.9)
Wrap = Callable[[torch.optim.Optimizer, nn.Module], torch.optim.Optimizer]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print_provenance()
    print(f"{'':22} {'bytes per parameter beyond SGD':>30}")
    print(f"{'':22} {'step':>12} {'with refresh':>17}")
    for name, (build, shape) in workloads().items():
        images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        labels = torch.zeros(shape[0], dtype=torch.long)
        base, _ = peaks(build, images, labels, lambda base, model: base)
        parameters = sum(parameter.numel() for parameter in build().parameters())
        print(f"{name}, {parameters:,} parameters; SGD itself {base / parameters:.2f}")
        for case, wrap in wraps(images, labels).items():
            plain, refreshing = peaks(build, images, labels, wrap)
            extra, extra_refreshing = ((peak - base) / parameters for peak in (plain, refreshing))
            print(f"  {case:20} {extra:12.3f} {extra_refreshing:17.3f}")


def workloads() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    def perceptron() -> nn.Module:
        return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))

    return {"perceptron, batch 1": (perceptron, (1, 1024)), "ResNet-18, batch 8": (resnet18, (8, 3, 32, 32))}


def wraps(images: Tensor, labels: Tensor) -> dict[str, Wrap]:
    table: dict[str, Wrap] = {"SAM": lambda base, model: sparsesam.SAM(base, model, rho=0.1)}
    for sparsity in SPARSITIES:

        def fisher(base: torch.optim.Optimizer, model: nn.Module, sparsity: float = sparsity) -> torch.optim.Optimizer:
            mask = sparsesam.fisher_mask((images, labels), cross_entropy, sparsity=sparsity, samples=len(images))
            return sparsesam.SSAM(base, model, rho=0.1, mask=mask)

        def dynamic(base: torch.optim.Optimizer, model: nn.Module, sparsity: float = sparsity) -> torch.optim.Optimizer:
            mask = sparsesam.dynamic_mask(sparsity=sparsity, total_steps=100, refresh=sparsesam.manual())
            return sparsesam.SSAM(base, model, rho=0.1, mask=mask)

        table[f"SSAM-F {sparsity}"] = fisher
        table[f"SSAM-D {sparsity}"] = dynamic
    return table


def peaks(build: Callable[[], nn.Module], images: Tensor, labels: Tensor, wrap: Wrap) -> tuple[int, int]:
    """Peak live bytes, without model and batch, of a step in the steady state and of one with a refresh."""
    torch.manual_seed(0)
    model = build()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3), model)

    def closure() -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        return loss.item()

    with LiveBytes([*model.parameters(), *model.buffers(), images, labels]) as live:
        optimizer.step(closure)  # makes the momentum and the first mask
        live.restart()
        optimizer.step(closure)
        plain = live.peak
        if isinstance(optimizer, sparsesam.SharpnessAware) and optimizer.mask is not None:
            optimizer.refresh_mask()
        live.restart()
        optimizer.step(closure)
        return plain, live.peak


if __name__ == "__main__":
    main()
