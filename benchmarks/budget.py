"""Predicted and measured cost of a step, in SGD steps: fixed masks and budgets, ResNet-18 and a small ViT.

python -m benchmarks.budget [--batch 64] [--rounds 9] [--warmup 2] [--threads 2] [--budgets 1.25 1.5] [--cpu-time]

All costs are measured first; then the cases take one step each per round, in turn. Predictions must be within 10 %.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.cases import Case, cifar_batch, ssam
from benchmarks.timing import arguments, begin, compare
from sparsesam import fixed_mask
from sparsesam.budget import BudgetMask, BudgetUnit, step_costs
from sparsesam.lab.models import resnet18
from sparsesam.lab.models.vit import vit
from sparsesam.masks.scores import Fisher

UNITS: tuple[BudgetUnit, ...] = ("tensor", "filter")
#: Each model, and the names with which its last block and its last stage, or half, begin.
MODELS = {
    "ResNet-18": (resnet18, ("layer4.1", "fc"), ("layer4", "fc")),
    "ViT, 4 blocks of 192": (
        partial(vit, patch_size=4, dim=192, depth=4, heads=3),
        ("blocks.3", "norm", "head"),
        ("blocks.2", "blocks.3", "norm", "head"),
    ),
}


def main() -> None:
    parser = arguments(__doc__, batch=64, rounds=9, warmup=2, threads=2)
    parser.add_argument("--budgets", type=float, nargs="*", default=[1.25, 1.5])
    options = begin(parser)
    if options.warmup < 2:
        parser.error(f"--warmup must be at least 2, got {options.warmup}: masks are made in the first step")
    data = cifar_batch(options.batch)
    for title, (build, block, stage) in MODELS.items():
        torch.manual_seed(0)
        model = build()
        costs = step_costs(model, data[0], how="cpu-time" if options.cpu_time else "time")
        masks = {"last block": masks_of(model, block), "last stage": masks_of(model, stage)}
        masks |= {"half of the filters": half_filters(masks_of(model, ("",)))}
        masks |= {"last stage, half of the filters": half_filters(masks["last stage"])}
        wraps = {name: ssam(fixed_mask(mask)) for name, mask in masks.items()}
        score = Fisher(data, cross_entropy, samples=min(16, options.batch))
        for budget in options.budgets:
            for unit in UNITS:
                wraps[f"budget {budget}, {unit}s"] = ssam(BudgetMask(costs, budget, score, unit))
        cases = {"SGD": Case(model, data), **{name: Case(model, data, wrap) for name, wrap in wraps.items()}}
        table = compare(cases, "SGD", options)
        print(f"\n{title}, batch {options.batch}, {options.rounds} interleaved rounds")
        print(f"{'':32} {'perturbed':>9} {'predicted':>9}  measured (quartiles)       off")
        for row in table:
            if row.name != "SGD":
                predicted = costs.step(cases[row.name].optimizer.masks)
                print(
                    f"{row.name:32} {cases[row.name].perturbed:9.1%} {predicted:9.3f}  {row.median:.3f} "
                    f"({row.low:.3f} to {row.high:.3f})  {predicted / row.median - 1:+6.1%}"
                )


def masks_of(model: nn.Module, prefixes: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: torch.full(p.shape, name.startswith(prefixes)) for name, p in model.named_parameters()}


def half_filters(masks: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every other filter of the weights."""
    kept = {name: mask.clone() for name, mask in masks.items()}
    for mask in kept.values():
        mask[1::2] &= mask.dim() < 2
    return kept


if __name__ == "__main__":
    main()
