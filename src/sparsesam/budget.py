"""A budget instead of a sparsity: say what a step may cost, and perturb the most important weights that fit."""

from __future__ import annotations

import copy
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsesam.ascent.noise import Noise
from sparsesam.call_trace import call, stopwatch
from sparsesam.costs import Floats, LayerCost, LayerCosts, layer_costs
from sparsesam.knapsack import best_prefixes, best_subset
from sparsesam.masks.errors import NonFiniteScoreError
from sparsesam.masks.fixed import FixedMask
from sparsesam.masks.mask import MaskRule
from sparsesam.masks.refresh import Refresh, by_hand
from sparsesam.masks.scores import Fisher, Moment, Score
from sparsesam.optimizer import SSAM

BudgetUnit = Literal["tensor", "filter"]
LossFn = Callable[..., Tensor]
MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]
Batch = tuple[Any, Any]


@dataclass(frozen=True)
class GradientEnergy:
    """g² of the ascent gradient: what a weight adds to the squared norm of the perturbation's direction."""

    needs_gradient: ClassVar[bool] = True

    def __call__(self, moment: Moment) -> dict[str, Tensor]:
        return {name: moment.gradient(name).square() for name in moment.parameters}


@dataclass(frozen=True, eq=False)
class BudgetMask(MaskRule):
    """The units with the most score among those that a step of the given cost can perturb.

        max  sum of scores over P     subject to     cost of a step that perturbs P <= budget

    Every layer is tried as the frontier, the earliest perturbed one. Behind it, normalization parameters and biases
    are perturbed in any case, being nearly free; the rest of the budget goes to whole weight tensors (exactly the
    best ones) or to their filters. It needs ``norm="masked"``: with "full" the engine cannot skip anything.
    """

    needs_masked_norm: ClassVar[bool] = True
    costs: LayerCosts
    budget: float
    score: Score = field(default_factory=GradientEnergy)
    unit: BudgetUnit = "tensor"
    refresh: Refresh = field(default_factory=by_hand)
    seed: int = 0
    _last: list[BudgetReport] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.unit not in get_args(BudgetUnit):
            raise ValueError(f'unit must be "tensor" or "filter", got {self.unit!r}')
        if not 1 <= self.budget < math.inf:
            raise ValueError(
                f"budget must be a finite number of at least 1, got {self.budget}; it is the cost of a step relative "
                "to the base optimizer's, SAM's is about 2"
            )
        openings = list(_openings(self.costs, self.costs.shapes, self.unit))
        self._require(openings)
        weights = [one.fixed + one.cheapest for one in openings if one.items]
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
        """What a step may cost beyond the base optimizer's, in the unit of the costs."""
        return (self.budget - 1) * self.costs.base

    def make(self, moment: Moment) -> dict[str, Tensor]:
        ones = {name: torch.ones_like(p, dtype=torch.bool) for name, p in moment.parameters.items()}
        self._check_known(ones)
        if self.costs.step(ones) <= self.budget:
            made = ones
        else:
            shapes = {name: p.shape for name, p in moment.parameters.items()}
            openings = list(_openings(self.costs, shapes, self.unit))
            self._require(openings)
            counts = {name: _unit_count(self.costs, name, self.unit) for name in shapes}
            scores = _unit_sums(self.score(moment), counts)
            made = _spread(_best(openings, scores, self._allowance), moment.parameters, counts)
        self._last[:] = [_report(self, made)]
        return made

    def report(self, masks: Mapping[str, Tensor] | None = None, *, measured: float | None = None) -> BudgetReport:
        """What was chosen last, or what these masks mean (``opt.masks``, after a resume); ``measured`` beside it."""
        if masks is None and not self._last:
            raise RuntimeError("report() needs a mask, but none was made yet; take a step or give masks=opt.masks")
        return replace(self._last[0] if masks is None else _report(self, masks), measured=measured)

    def _check_known(self, names: Mapping[str, Tensor]) -> None:
        strangers = [name for name in names if name not in self.costs.shapes]
        if strangers:
            raise ValueError(
                f"costs must be those of the model being trained, but {strangers[0]!r} is not among them; "
                "make the rule anew with budget_mask(model, ...), after freezing or unfreezing layers"
            )

    def _require(self, openings: Sequence[_Opening]) -> None:
        least = min((one.least for one in openings), default=math.inf)
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
    refresh: Refresh | None = None,
    seed: int = 0,
    model_loss: Callable[[nn.Module, Any], Tensor] | None = None,
) -> BudgetMask:
    """Perturb what a step of ``budget`` times the base optimizer's cost can pay for.

    ``example_input`` is a batch of inputs as in training; each layer's forward, input and weight gradient are
    measured on it (``how="time"``) or counted (``"count"``, reproducible, but blind to the machine). What is most
    worth perturbing is told by the Fisher information over ``data`` (with ``loss_fn`` or ``model_loss``), by
    ``score``, or else by the squared gradient. Use it with ``norm="masked"``:

    >>> rule = budget_mask(model, images, budget=1.25, data=train_set, loss_fn=cross_entropy)
    >>> opt = SSAM(base, model, mask=rule, norm="masked")
    >>> print(rule.report())            # after the first step
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
    return BudgetMask(costs, budget, score or GradientEnergy(), unit, refresh or by_hand(), seed)


# ---- the choice ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Item:
    """A weight tensor: ``costs[k]`` is what perturbing k of its units adds."""

    name: str
    costs: Floats


@dataclass(frozen=True)
class _Opening:
    """One frontier: what comes with it, what that costs, and what more there is to choose from."""

    free: tuple[str, ...]  # normalization parameters and biases behind the frontier
    fixed: float
    items: tuple[_Item, ...]

    @property
    def cheapest(self) -> float:
        return min(float(item.costs[1:].min()) for item in self.items)

    @property
    def least(self) -> float:
        return self.fixed if self.free else self.fixed + self.cheapest


def _openings(costs: LayerCosts, shapes: Mapping[str, torch.Size], unit: BudgetUnit) -> Iterator[_Opening]:
    """From the last layer to the first.

    An item is charged what it adds to the frontier's own passes. Two items that dirty the same calls are both
    charged for them, so a choice never costs more than it is charged, and less only where branches run in parallel.
    """
    places = {name: place for name, place in costs.first_use.items() if name in shapes}
    units = {name: _unit_costs(costs, name, unit) for name in places}
    for frontier in sorted(set(places.values()), reverse=True):
        behind = [name for name, place in places.items() if place >= frontier]
        free = tuple(name for name in behind if len(shapes[name]) < 2)
        sources = {*free, *(name for name in behind if places[name] == frontier)}
        passes = costs.passing(sources)
        items = tuple(
            _Item(name, np.concatenate([[0.0], units[name] + costs.passing({*sources, name}) - passes]))
            for name in behind
            if name not in free
        )
        yield _Opening(free, passes + sum(costs.perturbing(name, 1) for name in free), items)


def _unit_count(costs: LayerCosts, name: str, unit: BudgetUnit) -> int:
    """Filters, where they can be had for less than the whole tensor; else the tensor is the unit."""
    return costs.shapes[name][0] if unit == "filter" and costs.can_slice(name) else 1


def _unit_costs(costs: LayerCosts, name: str, unit: BudgetUnit) -> Floats:
    """The weight gradient and the moving of 1, 2, … units."""
    count = _unit_count(costs, name, unit)
    return np.array([costs.perturbing(name, k / count) for k in range(1, count + 1)])


def _unit_sums(scores: Mapping[str, Tensor], counts: Mapping[str, int]) -> dict[str, Floats]:
    """The score of each unit: the sum over its weights."""
    sums = {}
    for name, score in scores.items():
        total = score.detach().reshape(counts[name], -1).sum(1, dtype=torch.float64).cpu().numpy()
        if not np.isfinite(total).all():
            raise NonFiniteScoreError(f"the scores of {name!r} must be finite, got NaN or infinity")
        if (total < 0).any():
            raise ValueError(f"the scores of {name!r} must be at least 0, got {total.min()}; use squares or magnitudes")
        sums[name] = total
    return sums


def _best(openings: Sequence[_Opening], scores: Mapping[str, Floats], allowance: float) -> dict[str, list[int]]:
    """The units to perturb, by parameter, of the frontier that gathers the most score."""
    best, chosen = -1.0, {}
    for one in openings:
        left = allowance - one.fixed
        if left < 0:
            continue
        orders = [np.argsort(-scores[item.name], kind="stable") for item in one.items]
        values = [
            np.concatenate([[0.0], np.cumsum(scores[item.name][order])])
            for item, order in zip(one.items, orders, strict=True)
        ]
        taken = _taken(one.items, values, left)
        free = {name: [0] for name in one.free}
        total = sum(float(scores[name][0]) for name in free) + sum(v[k] for v, k in zip(values, taken, strict=True))
        if total > best and (free or any(taken)):
            weights = zip(one.items, orders, taken, strict=True)
            best, chosen = total, free | {item.name: order[:k].tolist() for item, order, k in weights}
    return chosen


def _taken(items: Sequence[_Item], values: Sequence[Floats], left: float) -> list[int]:
    """How many units of each item: whole tensors at their best or, if they gather more, filters."""
    chosen = best_subset([float(v[-1]) for v in values], [float(item.costs[-1]) for item in items], left)
    whole = [len(item.costs) - 1 if place in chosen else 0 for place, item in enumerate(items)]
    if all(len(item.costs) == 2 for item in items):
        return whole
    parts = best_prefixes(values, [item.costs for item in items], left)
    return max(whole, parts, key=lambda taken: sum(float(v[k]) for v, k in zip(values, taken, strict=True)))


def _spread(
    chosen: Mapping[str, list[int]], parameters: Mapping[str, Tensor], counts: Mapping[str, int]
) -> dict[str, Tensor]:
    """Masks in which the chosen units are True."""
    masks = {}
    for name, parameter in parameters.items():
        mask = torch.zeros(parameter.shape, dtype=torch.bool, device=parameter.device)
        mask.view(counts[name], -1)[chosen.get(name, [])] = True
        masks[name] = mask
    return masks


# ---- the report ----------------------------------------------------------------------------------------------


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
    """What a budget bought: ``predicted`` and ``measured`` are costs in steps of the base optimizer."""

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


def _report(rule: BudgetMask, masks: Mapping[str, Tensor]) -> BudgetReport:
    costs = rule.costs
    kept = {name: int(mask.count_nonzero()) for name, mask in masks.items()}
    total = sum(mask.numel() for mask in masks.values())
    rows = tuple(_row(layer, kept, costs) for layer in costs.layers)
    frontier = next((row.layer for row in rows if row.share > 0), None)
    share = sum(kept.values()) / total if total else 0.0
    return BudgetReport(rule.budget, costs.step(masks), None, frontier, share, rows)


def _row(layer: LayerCost, kept: Mapping[str, int], costs: LayerCosts) -> BudgetRow:
    size = sum(costs.shapes[name].numel() for name in layer.parameters)
    return BudgetRow(
        layer.layer,
        layer.forward / costs.base,
        layer.input_gradient / costs.base,
        layer.weight_gradient / costs.base,
        sum(kept.get(name, 0) for name in layer.parameters) / size if size else 0.0,
    )


# ---- the proof -----------------------------------------------------------------------------------------------


def measured_cost(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    rule: MaskRule,
    *,
    base: MakeOptimizer | None = None,
    rounds: int = 7,
    rho: float = 0.05,
) -> float:
    """A step of SSAM with this mask and norm="masked", in steps of the base optimizer: the median of rounds.

    Steps are taken on copies of the model, by turns, after two to warm up; the mask is made once, in the first of
    them, and not counted. ``base`` makes the optimizer from the parameters; SGD with momentum if it is left out.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}; 7 give a usable median")
    base = base or (lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9))
    noise = Noise(model.parameters())
    found = noise.read()
    try:
        steps = _plain_step(model, loss_fn, batch, base), _sparse_step(model, loss_fn, batch, base, rule, rho)
        ratios = []
        with stopwatch("time", next(model.parameters()).device) as clock:
            for turn in range(2 + rounds):
                seconds = [0.0, 0.0]
                for which in (0, 1) if turn % 2 else (1, 0):
                    start = clock()
                    steps[which]()
                    seconds[which] = clock() - start
                ratios.append(seconds[1] / seconds[0])
        return statistics.median(ratios[2:])
    finally:
        noise.write(found)


def _plain_step(model: nn.Module, loss_fn: LossFn, batch: Batch, base: MakeOptimizer) -> Callable[[], object]:
    model = copy.deepcopy(model).train()
    optimizer = base(model.parameters())
    return partial(optimizer.step, _closure(model, optimizer, loss_fn, batch))


def _sparse_step(
    model: nn.Module, loss_fn: LossFn, batch: Batch, base: MakeOptimizer, rule: MaskRule, rho: float
) -> Callable[[], object]:
    model = copy.deepcopy(model).train()
    maker = SSAM(base(model.parameters()), model, rho, mask=rule, norm="masked")
    maker.step(_closure(model, maker, loss_fn, batch), batch=batch)
    optimizer = SSAM(maker.base, model, rho, mask=FixedMask(maker.masks), norm="masked")
    return partial(optimizer.step, _closure(model, optimizer, loss_fn, batch))


def _closure(model: nn.Module, optimizer: Optimizer, loss_fn: LossFn, batch: Batch) -> Callable[[], float]:
    inputs, targets = batch

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_fn(call(model, inputs), targets)
        loss.backward()
        return float(loss.detach())

    return closure
