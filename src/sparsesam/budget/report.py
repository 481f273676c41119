"""What is perturbed within a budget, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sparsesam.budget.costs import LayerCost, LayerCosts


@dataclass(frozen=True)
class BudgetRow:
    """A layer's costs in parts of the base optimizer's step, and the share of its weights that is perturbed."""

    layer: str
    forward: float
    input_gradient: float
    weight_gradient: float
    share: float


@dataclass(frozen=True)
class BudgetReport:
    """What is perturbed within a budget: ``predicted`` and ``measured`` are costs in steps of the base optimizer."""

    budget: float
    predicted: float
    measured: float | None
    frontier: str | None
    share: float
    rows: tuple[BudgetRow, ...]

    def __str__(self) -> str:
        measured = "" if self.measured is None else f", measured {self.measured:.3f}"
        width = max(len(row.layer) for row in self.rows)
        head = f"{'layer':{width}} {'forward':>8} {'dX':>8} {'dW':>8} {'perturbed':>10}"
        lines = [
            f"budget {self.budget:.3f}, predicted {self.predicted:.3f}{measured} steps of the base optimizer",
            f"{self.share:.1%} of the weights are perturbed, the first of them in {self.frontier}",
            head,
        ]
        lines += [
            f"{row.layer:{width}} {row.forward:8.4f} {row.input_gradient:8.4f} {row.weight_gradient:8.4f} "
            f"{row.share:10.1%}"
            for row in self.rows
        ]
        return "\n".join(lines)


def report_of(budget: float, costs: LayerCosts, masks: Mapping[str, Tensor], measured: float | None) -> BudgetReport:
    kept = {name: int(mask.count_nonzero()) for name, mask in masks.items()}

    def row(layer: LayerCost) -> BudgetRow:
        size = sum(costs.shapes[name].numel() for name in layer.parameters)
        share = sum(kept.get(name, 0) for name in layer.parameters) / max(1, size)
        forward, input_gradient, weight_gradient = (
            price / costs.base for price in (layer.forward, layer.input_gradient, layer.weight_gradient)
        )
        return BudgetRow(layer.layer, forward, input_gradient, weight_gradient, share)

    rows = tuple(row(layer) for layer in costs.layers)
    frontier = next((row.layer for row in rows if row.share > 0), None)
    share = sum(kept.values()) / max(1, sum(mask.numel() for mask in masks.values()))
    return BudgetReport(budget, costs.step(masks), measured, frontier, share, rows)
