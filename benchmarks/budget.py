"""Predicted and measured cost of a step: fixed masks and budgets."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.cases import Case, cifar_batch, ssam
from benchmarks.runner import Session, benchmark
from benchmarks.timing import show
from sparsesam import fixed_mask
from sparsesam.budget import BudgetMask, BudgetUnit, step_costs
from sparsesam.lab.models import build_model
from sparsesam.lab.models.vit import VisionTransformer
from sparsesam.masks.scores import Fisher

#: The names with which the last block and the last stage, or half, of each model begin.
TAILS = {
    "resnet": (("layer4.1", "fc"), ("layer4", "fc")),
    "vit": (("blocks.3", "norm", "head"), ("blocks.2", "blocks.3", "norm", "head")),
}


@benchmark(rounds=9, only="", quick={"models": ("resnet10-small",), "batch": 2, "budgets": (10.0,)})
def budget(
    session: Session,
    *,
    models: tuple[str, ...] = ("resnet18", "vit"),
    batch: int = 64,
    budgets: tuple[float, ...] = (1.25, 1.5),
) -> None:
    """How far is the predicted cost of a step from the measured one, and does a budget mask keep its budget?

    ``vit`` has 4 blocks of width 192. Costs are counted; then the cases take one step each per round.
    """
    data = cifar_batch(batch)
    for name in models:
        torch.manual_seed(0)
        model = VisionTransformer(patch_size=4, dim=192, depth=4, heads=3) if name == "vit" else build_model(name)
        block, stage = TAILS["vit" if name == "vit" else "resnet"]
        costs = step_costs(model, data[0])
        masks = {
            "last block": masks_of(model, block),
            "last stage": masks_of(model, stage),
            "half of the filters": half_filters(masks_of(model, ("",))),
            "last stage, half of the filters": half_filters(masks_of(model, stage)),
        }
        wraps = {"SGD": None, **{label: ssam(fixed_mask(mask)) for label, mask in masks.items()}}
        score = Fisher(data, cross_entropy, samples=min(16, batch))
        for limit in budgets:
            for unit in get_args(BudgetUnit):
                wraps[f"budget {limit}, {unit}s"] = ssam(BudgetMask(costs, limit, score, unit))
        cases = {label: Case(model, data, wrap) for label, wrap in session.chosen(wraps, "SGD").items()}
        rows = []
        for label, ratio in session.compare(cases, "SGD").items():
            if label != "SGD":
                predicted = costs.step(cases[label].optimizer.masks)
                off = f"{predicted / ratio.median - 1:+.1%}"
                rows.append((label, f"{cases[label].perturbed:.1%}", f"{predicted:.3f}", ratio, off))
        show(f"{name} | perturbed | predicted | measured (quartiles) | off", rows)


def masks_of(model: nn.Module, prefixes: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: torch.full(p.shape, name.startswith(prefixes)) for name, p in model.named_parameters()}


def half_filters(masks: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every other filter of the weights."""
    for mask in masks.values():
        mask[1::2] &= mask.dim() < 2
    return masks
