"""The mask rule for a budget: the units with the largest total score that fit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from sparsesam.budget.costs import Floats, StepCosts, step_costs
from sparsesam.masks.fisher import LossFn, ModelLoss
from sparsesam.masks.mask import MaskRule
from sparsesam.masks.scores import Fisher, Score, ScoreContext
from sparsesam.utils.checks import NonFiniteScoreError, check_choice, check_number

BudgetUnit = Literal["tensor", "filter"]
#: The cost of perturbing from a parameter on, and by later parameter the added cost of 0, 1, 2, … of its units.
Frontier = tuple[float, dict[str, Floats]]


@dataclass(frozen=True, eq=False)
class BudgetMask(MaskRule):
    """Perturbs the units with the largest total score that a step of the given cost can perturb.

        max  sum of scores over P     subject to     cost of a step that perturbs P <= budget

    Without a score, that of a weight is its squared gradient.
    Every parameter is tried as the frontier, the earliest that is perturbed. From there on, the budget goes to the
    parameters, or to their filters, with the largest scores per cost. With ``norm="full"`` every gradient is computed.
    """

    needs_masked_norm: ClassVar[bool] = True
    costs: StepCosts
    budget: float
    score: Score | None = None
    unit: BudgetUnit = "tensor"
    refresh: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, get_args(BudgetUnit))
        check_number("budget", self.budget, "it counts steps of the base optimizer, SAM's costs about 2", least=1)
        weights = {name: shape for name, shape in self.costs.shapes.items() if len(shape) > 1}
        least = _least(self._frontiers(self.costs.shapes), weights)
        if weights and least > self._allowance:
            warnings.warn(
                f"no weight {self.unit} fits into budget={self.budget}, only normalization parameters and biases near "
                f"the output; the cheapest weight {self.unit} needs {1 + least / self.costs.base:.4f}",
                stacklevel=4,
            )

    @property
    def needs_gradient(self) -> bool:
        return self.score is None or self.score.needs_gradient

    @property
    def _allowance(self) -> float:
        """The cost of a step allowed beyond the base optimizer's, in the unit of the costs."""
        return (self.budget - 1) * self.costs.base

    def make(self, context: ScoreContext) -> dict[str, Tensor]:
        # Contiguous, whatever the memory format of the weights.
        masks = {name: torch.ones(p.shape, dtype=torch.bool, device=p.device) for name, p in context.parameters.items()}
        if unknown := [name for name in masks if name not in self.costs.shapes]:
            raise ValueError(
                f"costs must be those of the model being trained, but {unknown[0]!r} is not among them; "
                "make a new rule with budget_mask(model, ...) after freezing or unfreezing layers"
            )
        if self.costs.step(masks) <= self.budget:
            return masks
        counts = {name: self._unit_count(name) for name in masks}
        scores = (
            {name: context.gradient(name).square() for name in masks} if self.score is None else self.score(context)
        )
        chosen = best_units(self._frontiers(context.parameters), unit_sums(scores, counts), self._allowance)
        for name, mask in masks.items():
            mask.zero_().view(counts[name], -1)[chosen.get(name, [])] = True
        return masks

    def _unit_count(self, name: str) -> int:
        """The number of filters, if they can be computed separately; otherwise 1, the tensor itself."""
        return self.costs.shapes[name][0] if self.unit == "filter" and name in self.costs.filters else 1

    def _frontiers(self, names: Mapping[str, Any]) -> list[Frontier]:
        """Returns what can be perturbed of these parameters; raises if nothing fits.

        An item is charged the cost that it adds to the passes of the frontier. If two items need the same input
        gradients, both are charged for them, so a choice never costs more than its charge, and less only with parallel
        branches.
        """
        costs, frontiers = self.costs, []
        places = {name: place for name, place in costs.first_use.items() if name in names}
        units = {}
        for name in places:
            count = self._unit_count(name)
            units[name] = np.array([costs.perturbing(name, k / count) for k in range(count + 1)])
        for frontier in sorted(set(places.values())):
            first = {name for name, place in places.items() if place == frontier}
            fixed, items = costs.passing(first), {}
            for name in (name for name, place in places.items() if place >= frontier):
                added = costs.passing({*first, name}) - fixed
                items[name] = units[name] + added * (np.arange(len(units[name])) > 0)
            frontiers.append((fixed, items))
        least = _least(frontiers, names)
        if least > self._allowance:
            raise ValueError(
                f"budget must be at least {1 + least / costs.base:.4f} for this model, got {self.budget}: "
                "perturbing only its cheapest parameters costs that much; give more, or train with the base optimizer"
            )
        return frontiers


def _least(frontiers: Sequence[Frontier], names: Mapping[str, Any]) -> float:
    """Returns the cost of perturbing the cheapest unit of these parameters."""
    first = [fixed + float(items[name][1]) for fixed, items in frontiers for name in items.keys() & names.keys()]
    return min(first, default=math.inf)


def unit_sums(scores: Mapping[str, Tensor], counts: Mapping[str, int]) -> dict[str, Floats]:
    """Returns the score of each unit: the sum over its weights."""
    sums = {}
    for name, score in scores.items():
        total = score.detach().reshape(counts[name], -1).sum(1, dtype=torch.float64).cpu().numpy()
        if not np.isfinite(total).all():
            raise NonFiniteScoreError(f"the scores of {name!r} must be finite, got NaN or infinity")
        if (total < 0).any():
            raise ValueError(f"the scores of {name!r} must be at least 0, got {total.min()}; use squares or magnitudes")
        sums[name] = total
    return sums


def best_units(frontiers: Sequence[Frontier], scores: Mapping[str, Floats], allowance: float) -> dict[str, list[int]]:
    """Returns the units to perturb, by parameter, for the frontier with the largest total score."""
    best, chosen = 0.0, {}
    for fixed, items in frontiers:
        if fixed <= allowance:
            orders = [np.argsort(-scores[name], kind="stable") for name in items]
            sums = [np.cumsum([0.0, *scores[name][order]]) for name, order in zip(items, orders, strict=True)]
            taken = best_prefixes(sums, list(items.values()), allowance - fixed)
            total = sum(float(values[k]) for values, k in zip(sums, taken, strict=True))
            if total > best:
                chosen = {name: order[:k].tolist() for name, order, k in zip(items, orders, taken, strict=True)}
                best = total
    return chosen


def best_prefixes(values: Sequence[Floats], costs: Sequence[Floats], capacity: float) -> list[int]:
    """Returns how many of the first entries of each list to take; ``values[l][k]``, ``costs[l][k]`` are of k entries.

    For a price p per unit of cost, the best k of each list maximizes values[l][k] - p * costs[l][k]. The choice at the
    lowest price that fits is optimal for the capacity that it uses; the rest is filled greedily, by the largest gain.
    The total is below the optimum by at most the value of one list.
    """
    longest = max(map(len, values))
    value = np.stack([np.pad(entries, (0, longest - len(entries))) for entries in values])
    cost = np.stack([np.pad(entries, (0, longest - len(entries)), constant_values=np.inf) for entries in costs])
    lists = np.arange(len(values))
    density = np.divide(value, cost, out=np.zeros_like(value), where=cost > 0)
    low, high = 0.0, 2 * float(density.max()) or 1.0
    taken = np.argmax(value - high * cost, axis=1)
    for _ in range(60):
        price = (low + high) / 2
        choice = np.argmax(value - price * cost, axis=1)
        if cost[lists, choice].sum() <= capacity:
            high, taken = price, choice
        else:
            low = price
    while True:
        spent, reached = cost[lists, taken][:, None], value[lists, taken][:, None]
        gain = np.where(cost - spent <= capacity - spent.sum(), value - reached, 0.0)
        place, many = np.unravel_index(int(np.argmax(gain)), gain.shape)
        if gain[place, many] <= 0:
            return [int(k) for k in taken]
        taken[place] = many


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
    refresh: int | None = None,
    seed: int = 0,
    model_loss: ModelLoss | None = None,
) -> BudgetMask:
    """Perturbs what fits into a step of ``budget`` times the base optimizer's cost; needs ``norm="masked"``.

    Args:
        model: the model that is trained.
        example_input: a batch of inputs as in training, on which the operations of a pass are counted.
        budget: what a step may cost, in steps of the base optimizer; SAM costs about 2. Operations are counted, which
            is reproducible; the time of a step may be up to a tenth longer. ``rule.costs.step(opt.masks)`` is the cost
            of what was chosen.
        data: the data on which Fisher information is measured, as in `fisher_mask`. Without it, ``score`` is used.
        loss_fn: as in `fisher_mask`.
        samples: as in `fisher_mask`.
        score: a `Score` in place of Fisher information. Default without ``data``: the squared gradient.
        unit: perturb whole weight tensors, ``"tensor"``, or some of their filters, ``"filter"``.
        refresh: the optimizer steps between two masks. Default: the first mask is kept.
        seed: the seed for drawing samples.
        model_loss: as in `fisher_mask`.

    Examples:
        >>> rule = sparsesam.budget_mask(model, x, budget=1.5)
        >>> opt = sparsesam.SSAM(base, model, rho=0.1, mask=rule, norm="masked")
        >>> loss = opt.step(closure)
        >>> rule.costs.step(opt.masks) <= 1.5
        True
    """
    if score is not None and data is not None:
        raise ValueError("score and data must not both be given: data is what Fisher scores are measured on")
    if data is not None:
        score = Fisher(data, loss_fn, samples=samples, model_loss=model_loss)
    elif loss_fn is not None or model_loss is not None:
        raise ValueError(
            "data must be given with loss_fn or model_loss, got None; without a loss the scores are squared gradients"
        )
    return BudgetMask(step_costs(model, example_input), budget, score, unit, refresh, seed)
