"""Predicted and measured cost of a step with a budget mask."""

from __future__ import annotations

from typing import get_args

import torch
from torch.nn.functional import cross_entropy

from benchmarks.cases import Case, cifar_batch, ssam
from benchmarks.runner import Session, benchmark
from benchmarks.timing import show
from sparsesam.budget import BudgetMask, BudgetUnit, step_costs
from sparsesam.lab.models import build_model
from sparsesam.masks.scores import Fisher


@benchmark(rounds=9, only="", quick={"model": "resnet10-small", "batch": 2, "budgets": (10.0,)})
def budget(
    session: Session, *, model: str = "resnet18", batch: int = 64, budgets: tuple[float, ...] = (1.1, 1.25)
) -> None:
    """How far is the predicted cost of a step from the measured one, and does a budget mask keep its budget?"""
    torch.manual_seed(0)
    data, network = cifar_batch(batch), build_model(model)
    costs, score = step_costs(network, data[0]), Fisher(data, cross_entropy, samples=min(16, batch))
    masks = {
        f"budget {limit}, {unit}s": BudgetMask(costs, limit, score, unit)
        for limit in budgets
        for unit in get_args(BudgetUnit)
    }
    wraps = {"SGD": None, **{label: ssam(mask) for label, mask in masks.items()}}
    cases = {label: Case(network, data, wrap) for label, wrap in session.chosen(wraps, "SGD").items()}
    rows = []
    for label, ratio in session.compare(cases, "SGD").items():
        if label != "SGD":
            predicted = costs.step(cases[label].optimizer.masks)
            off = f"{predicted / ratio.median - 1:+.1%}"
            rows.append((label, f"{cases[label].perturbed:.1%}", f"{predicted:.3f}", ratio, off))
    show(f"{model} | perturbed | predicted | measured (quartiles) | off", rows)
