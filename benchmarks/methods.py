"""Cost of a step of every method in SGD steps, beside pytorch-optimizer's: ResNet-18 on CIFAR shapes, one run.

python -m benchmarks.methods [--batch 64] [--rounds 11] [--warmup 1] [--threads 2]

A timed run is five steps, the period of LookSAM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import sparsesam
from benchmarks.cases import SGD, Case, Wrap, cifar_batch
from benchmarks.timing import arguments, begin, compare, format_ratios
from sparsesam.lab.models import resnet18

PERIOD = 5

METHODS: dict[str, Wrap | None] = {
    "SGD": None,
    "SAM": lambda base, model: sparsesam.SAM(base, model, 0.05),
    "ASAM": lambda base, model: sparsesam.SAM(base, model, 0.5, adaptive=True),
    "SAM, radius by layer": lambda base, model: sparsesam.SAM(base, model, 0.01, radius="layer"),
    "SAM, radius by element": lambda base, model: sparsesam.SAM(base, model, 0.001, radius="element"),
    "SAM, two ascent steps": lambda base, model: sparsesam.SAM(base, model, 0.05, ascent_steps=2),
    "SAM-ON": lambda base, model: sparsesam.SSAM(
        base, model, 0.1, mask=sparsesam.fixed_mask(types=sparsesam.NORMALIZATION), norm="masked"
    ),
    "last block": lambda base, model: sparsesam.SSAM(
        base, model, 0.1, mask=sparsesam.fixed_mask("layer4.*", "fc.*"), norm="masked"
    ),
    "GSAM": lambda base, model: sparsesam.GSAM(base, model, 0.05),
    "WSAM": lambda base, model: sparsesam.WSAM(base, model, 0.05),
    "LookSAM": lambda base, model: sparsesam.LookSAM(base, model, 0.05, every=PERIOD),
    "FriendlySAM": lambda base, model: sparsesam.FriendlySAM(base, model, 0.05),
    "ZSharp": lambda base, model: sparsesam.ZSharp(base, model, 0.05),
    "ESAM": lambda base, model: sparsesam.ESAM(base, model, 0.05),
    "MomentumSAM": lambda base, model: sparsesam.MomentumSAM(base, model, 0.25),
    "ExtrapolatedSAM": lambda base, model: sparsesam.ExtrapolatedSAM(base, model, 10.0),
}


def theirs(name: str, **options: Any) -> Wrap:
    """A class of pytorch-optimizer that makes its base optimizer itself."""

    def wrap(base: Any, model: nn.Module) -> Any:
        import pytorch_optimizer

        first = (model,) if name == "WSAM" else ()
        return getattr(pytorch_optimizer, name)(*first, model.parameters(), torch.optim.SGD, rho=0.05, **options, **SGD)

    return wrap


class TheirGSAM:
    """pytorch-optimizer's GSAM, whose batch is given beforehand."""

    def __init__(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        from pytorch_optimizer import GSAM
        from pytorch_optimizer.lr_scheduler import ProportionScheduler

        base = torch.optim.SGD(model.parameters(), **SGD)
        constant = torch.optim.lr_scheduler.ConstantLR(base, 1.0)
        rho = ProportionScheduler(constant, max_lr=1.0, max_value=0.05, min_value=0.05)
        self.optimizer = GSAM(model.parameters(), base, model, rho)
        self.optimizer.set_closure(nn.CrossEntropyLoss(), *batch)

    def __call__(self) -> Any:
        return self.optimizer.step()


class TheirWSAM(Case):
    """pytorch-optimizer's WSAM, whose step runs both passes."""

    def __call__(self) -> Any:
        return self.optimizer.step(self.closure)


def cases(batch: int, model: nn.Module) -> dict[str, Callable[[], object]]:
    """Returns a step of each method, each with its own copy of the model."""
    data = cifar_batch(batch)
    found: dict[str, Callable[[], Any]] = {name: Case(model, data, wrap) for name, wrap in METHODS.items()}
    for name, options in {"SAM": {}, "FriendlySAM": {}, "LookSAM": {"k": PERIOD}}.items():
        found[f"pytorch-optimizer {name}"] = Case(model, data, theirs(name, **options))
    found["pytorch-optimizer WSAM"] = TheirWSAM(model, data, theirs("WSAM"))
    found["pytorch-optimizer GSAM"] = TheirGSAM(Case(model, data).model, data)
    return {name: _repeated(step) for name, step in found.items()}


def _repeated(step: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(PERIOD):
            step()

    return run


def main() -> None:
    options = begin(arguments(__doc__, batch=64, rounds=11, warmup=1, threads=2))
    torch.manual_seed(0)
    rows = compare(cases(options.batch, resnet18()), "SGD", options)
    print(f"ResNet-18, batch {options.batch}, {options.rounds} interleaved rounds of {PERIOD} steps")
    print(format_ratios(rows, "SGD"))


if __name__ == "__main__":
    main()
