"""The mask rule for a budget, its constructor, and a report of what it perturbs per layer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from sparsesam.budget.choice import (
    BudgetUnit,
    FrontierOption,
    best_units,
    frontier_options,
    unit_count,
    unit_masks,
    unit_sums,
)
from sparsesam.budget.costs import LayerCost, LayerCosts, layer_costs
from sparsesam.masks.fisher_problem import LossFn, ModelLoss
from sparsesam.masks.mask import MaskRule
from sparsesam.masks.scores import Fisher, GradientEnergy, Score, ScoreContext
from sparsesam.utils.checks import check_choice, is_within


@dataclass(frozen=True)
class BudgetReport:
    """What is perturbed within a budget; all costs are in steps of the base optimizer."""

    budget: float
    predicted: float
    frontier: str | None
    share: float
    rows: tuple[LayerCost, ...]

    def __str__(self) -> str:
        width = max(len(row.layer) for row in self.rows)
        head = f"{'layer':{width}} {'forward':>8} {'dX':>8} {'dW':>8} {'perturbed':>10}"
        lines = [
            f"budget {self.budget:.3f}, predicted {self.predicted:.3f} steps of the base optimizer",
            f"{self.share:.1%} of the weights are perturbed, the first of them in {self.frontier}",
            head,
        ]
        lines += [
            f"{row.layer:{width}} {row.forward:8.4f} {row.input_gradient:8.4f} {row.weight_gradient:8.4f} "
            f"{row.share:10.1%}"
            for row in self.rows
        ]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class BudgetMask(MaskRule):
    """Perturbs the units with the largest total score that a step of the given cost can perturb.

        max  sum of scores over P     subject to     cost of a step that perturbs P <= budget

    Every layer is tried as the frontier, the earliest perturbed layer. From there on, all normalization parameters and
    biases are perturbed, because they cost almost nothing; the rest of the budget goes to whole weight tensors (an
    exact optimum) or to their filters. It needs ``norm="masked"``: with "full" the engine can leave out less.
    """

    needs_masked_norm: ClassVar[bool] = True
    costs: LayerCosts
    budget: float
    score: Score = field(default_factory=GradientEnergy)
    unit: BudgetUnit = "tensor"
    refresh: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, get_args(BudgetUnit))
        if not is_within(self.budget, 1, math.inf) or self.budget == math.inf:
            raise ValueError(
                f"budget must be a finite number of at least 1, got {self.budget}; it is the cost of a step relative "
                "to the base optimizer's, SAM's is about 2"
            )
        options = list(frontier_options(self.costs, self.costs.shapes, self.unit))
        self._require(options)
        weights = [one.fixed + one.cheapest for one in options if one.items]
        if weights and min(weights) > self._allowance:
            warnings.warn(
                f"no weight {self.unit} fits into budget={self.budget}, only normalization parameters and biases near "
                f"the output; the cheapest weight {self.unit} needs {1 + min(weights) / self.costs.base:.4f}",
                stacklevel=4,
            )

    @property
    def needs_gradient(self) -> bool:
        return self.score.needs_gradient

    @property
    def _allowance(self) -> float:
        """The cost of a step allowed beyond the base optimizer's, in the unit of the costs."""
        return (self.budget - 1) * self.costs.base

    def make(self, context: ScoreContext) -> dict[str, Tensor]:
        ones = {name: torch.ones_like(p, dtype=torch.bool) for name, p in context.parameters.items()}
        self._check_known(ones)
        if self.costs.step(ones) <= self.budget:
            return ones
        shapes = {name: p.shape for name, p in context.parameters.items()}
        options = list(frontier_options(self.costs, shapes, self.unit))
        self._require(options)
        counts = {name: unit_count(self.costs, name, self.unit) for name in shapes}
        scores = unit_sums(self.score(context), counts)
        return unit_masks(best_units(options, scores, self._allowance), context.parameters, counts)

    def report(self, masks: Mapping[str, Tensor]) -> BudgetReport:
        """Returns what these masks (usually ``opt.masks``) perturb and cost."""
        if not masks:
            raise ValueError("masks must not be empty; opt.masks is empty before the first step")
        kept = {name: int(mask.count_nonzero()) for name, mask in masks.items()}
        rows = tuple(self._row(layer, kept) for layer in self.costs.layers)
        frontier = next((row.layer for row in rows if row.share > 0), None)
        share = sum(kept.values()) / max(1, sum(mask.numel() for mask in masks.values()))
        return BudgetReport(self.budget, self.costs.step(masks), frontier, share, rows)

    def _row(self, layer: LayerCost, kept: Mapping[str, int]) -> LayerCost:
        """Returns a layer's costs in steps of the base optimizer."""
        size = sum(self.costs.shapes[name].numel() for name in layer.parameters)
        return replace(
            layer,
            forward=layer.forward / self.costs.base,
            input_gradient=layer.input_gradient / self.costs.base,
            weight_gradient=layer.weight_gradient / self.costs.base,
            share=sum(kept.get(name, 0) for name in layer.parameters) / max(1, size),
        )

    def _check_known(self, names: Mapping[str, Tensor]) -> None:
        unknown = [name for name in names if name not in self.costs.shapes]
        if unknown:
            raise ValueError(
                f"costs must be those of the model being trained, but {unknown[0]!r} is not among them; "
                "make a new rule with budget_mask(model, ...) after freezing or unfreezing layers"
            )

    def _require(self, options: Sequence[FrontierOption]) -> None:
        least = min((one.least for one in options), default=math.inf)
        if least > self._allowance:
            raise ValueError(
                f"budget must be at least {1 + least / self.costs.base:.4f} for this model, got {self.budget}: "
                "perturbing only its cheapest parameters costs that much; give more, or train with the base optimizer"
            )


def budget_mask(
    model: nn.Module,
    example_input: Any,
    budget: float = 1.25,
    *,
    data: Any = None,
    loss_fn: LossFn | None = None,
    samples: int = 128,
    score: Score | None = None,
    unit: BudgetUnit = "tensor",
    how: Literal["time", "cpu-time", "count"] = "time",
    refresh: int | None = None,
    seed: int = 0,
    model_loss: ModelLoss | None = None,
) -> BudgetMask:
    """Perturbs what fits into a step of ``budget`` times the base optimizer's cost; needs ``norm="masked"``.

    Args:
        model: the model that is trained.
        example_input: a batch of inputs as in training, on which the cost of each layer is measured.
        budget: what a step may cost, in steps of the base optimizer; SAM costs about 2.
        data: the data on which Fisher information is measured, as in `fisher_mask`. Without it, ``score`` is used.
        loss_fn: as in `fisher_mask`.
        samples: as in `fisher_mask`.
        score: a `Score` in place of Fisher information. Default without ``data``: the squared gradient.
        unit: perturb whole weight tensors, ``"tensor"``, or some of their filters, ``"filter"``.
        how: measure the ``"time"`` or ``"cpu-time"`` of each layer's forward, input gradient and weight gradient, or
            ``"count"`` their operations, which is reproducible but ignores the machine.
        refresh: the optimizer steps between two masks. Default: the first mask is kept.
        seed: the seed for drawing samples.
        model_loss: as in `fisher_mask`.

    Examples:
        >>> rule = sparsesam.budget_mask(model, x, budget=1.5, how="count")
        >>> opt = sparsesam.SSAM(base, model, rho=0.1, mask=rule, norm="masked")
        >>> loss = opt.step(closure)
        >>> rule.report(opt.masks).predicted <= 1.5
        True
    """
    if score is not None and data is not None:
        raise ValueError("score and data must not both be given: data is what Fisher scores are measured on")
    if data is not None:
        if (loss_fn is None) == (model_loss is None):
            raise ValueError("with data, give either loss_fn(output, target) or model_loss(model, batch), and not both")
        score = Fisher(data, loss_fn, samples=samples, model_loss=model_loss)
    elif loss_fn is not None or model_loss is not None:
        raise ValueError(
            "data must be given with loss_fn or model_loss, got None; without a loss the scores are squared gradients"
        )
    costs = layer_costs(model, example_input, how=how)
    return BudgetMask(costs, budget, score or GradientEnergy(), unit, refresh, seed)
