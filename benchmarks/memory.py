"""Peak memory of a step beyond the base optimizer's own, in bytes per parameter.

python -m benchmarks.memory [--threads 2]

Measured on a perceptron with one sample, where every temporary of the optimizer shows, and on ResNet-18 with eight,
where activations hide some. A step with a mask refresh is reported separately.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sparsesam
from benchmarks.cases import Batch, Case, Wrap, sam, ssam
from benchmarks.timing import arguments, begin
from sparsesam.lab.models import resnet18


def main() -> None:
    begin(arguments(__doc__, threads=2))
    print(f"{'':22} {'bytes per parameter beyond SGD':>30}")
    print(f"{'':22} {'step':>12} {'with refresh':>17}")
    torch.manual_seed(0)
    perceptron = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    report("perceptron, batch 1", perceptron, torch.randn(1, 1024))
    report("ResNet-18, batch 8", resnet18(), torch.randn(8, 3, 32, 32))


def report(name: str, model: nn.Module, images: Tensor) -> None:
    batch = (images, torch.zeros(len(images), dtype=torch.long))
    base = Case(model, batch).peak_bytes()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}, {parameters:,} parameters; SGD itself {base / parameters:.2f}")
    for case, wrap in wraps(batch).items():
        extra, with_refresh = (
            (Case(model, batch, wrap).peak_bytes(refresh=refresh) - base) / parameters for refresh in (False, True)
        )
        print(f"  {case:20} {extra:12.3f} {with_refresh:17.3f}")


def wraps(batch: Batch) -> dict[str, Wrap]:
    table: dict[str, Wrap] = {"SAM": sam}
    for sparsity in (0.5, 0.9):
        fisher = sparsesam.fisher_mask(batch, cross_entropy, sparsity=sparsity, samples=len(batch[1]))
        dynamic = sparsesam.dynamic_mask(sparsity=sparsity, total_steps=100, refresh=None)
        table[f"SSAM-F {sparsity}"] = ssam(fisher, norm="full")
        table[f"SSAM-D {sparsity}"] = ssam(dynamic, norm="full")
    return table


if __name__ == "__main__":
    main()
