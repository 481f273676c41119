"""Patterns of whole tensors, filters or columns: units of weights that are kept or dropped together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards
from sparsesam.masks.patterns.base import Choice, Pattern, left_after_drop, weight_budget
from sparsesam.masks.select import BoolMasks, Tensors, check_scores, count_true, random_scores
from sparsesam.utils.checks import check_choice

Unit = Literal["tensor", "filter", "column"]


@dataclass(frozen=True)
class Structured(Pattern):
    """Keeps whole units: ``"tensor"``, ``"filter"`` (index along dim 0) or ``"column"`` (index along dim 1).

    A unit's score is the mean of its weights' scores. Each entry of a 1-D tensor is its own filter and column; a 0-D
    tensor is one unit. `drop_and_grow` keeps, of the kept units, those with the largest ``keep`` that fit into
    kept - N_drop weights: at least N_drop weights are dropped. Random growth draws once per unit.

    Args:
        unit: what is kept or left out as a whole.
        rounding: units are taken by decreasing score. ``"below"``: each that fits into round((1 - sparsity) * d)
            weights, so that the number kept is at most this budget and no further unit would fit. ``"reach"``: until
            the budget is reached, as in the paper's code, so that the last unit may exceed it.
    """

    unit: Unit = "filter"
    rounding: Literal["below", "reach"] = "below"

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, get_args(Unit))
        check_choice("rounding", self.rounding, ("below", "reach"))

    def _grow(self, choice: Choice, first: Tensors | None, like: Tensors, sparsity: float, shards: Shards) -> BoolMasks:
        units = Units(self.unit, shards)
        kept = torch.zeros_like(units.sizes, dtype=torch.bool) if first is None else units.kept(first)
        left = weight_budget(shards, sparsity) - int(units.sizes[kept].sum())
        fill = fill_greedily if self.rounding == "below" else fill_until_reached
        grown = fill(units.scores(choice).masked_fill(kept, -math.inf), units.sizes, left)
        return units.expand(kept | grown, like)

    def _drop(self, keep: Choice, masks: Tensors, sparsity: float, ratio: float, shards: Shards) -> BoolMasks:
        units = Units(self.unit, shards)
        left = left_after_drop(count_true(masks, shards), ratio)
        if self.rounding == "below":  # "reach" allows masks larger than the budget
            left = min(left, weight_budget(shards, sparsity))
        scores = units.scores(keep).masked_fill(~units.kept(masks), -math.inf)
        return units.expand(fill_greedily(scores, units.sizes, left), masks)


class Units:
    """The units of all tensors, which may be sharded, as CPU vectors that every rank holds as a whole.

    For a tensor of shape (O, C, ...) a filter is an index along O, a column an index along C. Every entry of a 1-D
    tensor is its own filter and column; a 0-D tensor is one unit. Ranks exchange one number per unit.

    ``sizes``: the number of weights of each unit, shape (units,).
    """

    def __init__(self, unit: Unit, shards: Shards) -> None:
        self.unit, self.shards = unit, shards
        shapes = {name: part.shape for name, part in shards.parts.items()}
        self._axes = {name: _axis_of(unit, len(shape)) for name, shape in shapes.items()}
        self._counts = {name: 1 if axis is None else shapes[name][axis] for name, axis in self._axes.items()}
        sizes = [shape.numel() // max(1, self._counts[name]) for name, shape in shapes.items()]
        counts = torch.tensor(list(self._counts.values()), dtype=torch.int64)
        self.sizes = torch.tensor(sizes, dtype=torch.int64).repeat_interleave(counts)

    def scores(self, choice: Choice) -> Tensor:
        """Returns for each unit a random number or the mean score, in float64.

        Sums of equal float32 scores are exact in float64, so that equal units tie. An entry of -inf makes its unit
        -inf, even if the unit also holds +inf.
        """
        if isinstance(choice, torch.Generator):
            drawn = random_scores({name: torch.empty(n) for name, n in self._counts.items()}, generator=choice)
            return torch.cat([torch.empty(0, dtype=torch.float64), *drawn.values()])
        check_scores(choice, self.shards)
        sums = self._gathered({name: self._view(name, score).double().sum((0, 2)) for name, score in choice.items()})
        means = sums / self.sizes.clamp(min=1)
        return means.masked_fill(means.isnan(), -math.inf)

    def kept(self, masks: Tensors) -> Tensor:
        """Returns one bool per unit; raises ValueError if a mask keeps only a part of a unit."""
        found = {}
        for name, mask in masks.items():
            view = self._view(name, mask)
            some = view.any(2).any(0)
            if not torch.equal(view, some[None, :, None].expand_as(view)):
                raise ValueError(
                    f"masks[{name!r}] keeps a part of a {self.unit}; drop_and_grow needs whole units, start from "
                    "select()"
                )
            found[name] = some.double()
        return self._gathered(found) > 0

    def expand(self, kept: Tensor, like: Tensors) -> BoolMasks:
        """Returns masks shaped like ``like``, in which each entry has the value of its unit."""
        masks, of_units = {}, self.by_tensor(kept)
        for name, tensor in like.items():
            masks[name] = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
            if tensor.numel():
                self._view(name, masks[name])[:] = of_units[name][self._index(name)].to(tensor.device)[:, None]
        return masks

    def by_tensor(self, values: Tensor) -> dict[str, Tensor]:
        """Split a vector of all units into one of each tensor."""
        return dict(zip(self._counts, values.split(list(self._counts.values())), strict=True)) if self._counts else {}

    def _view(self, name: str, tensor: Tensor) -> Tensor:
        """Reshape to (before, units, after)."""
        axis, shape = self._axes[name], tensor.shape
        if axis is None:
            return tensor.detach().reshape(1, 1, -1)
        return tensor.detach().reshape(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))

    def _index(self, name: str) -> Tensor:
        """Returns the indices of the units of which this rank holds entries."""
        axis = self._axes[name]
        return torch.zeros(1, dtype=torch.int64) if axis is None else self.shards.parts[name].indices[axis]

    def _gathered(self, parts: Tensors) -> Tensor:
        """Sum one float64 number per unit over all ranks."""
        vector = torch.zeros(len(self.sizes), dtype=torch.float64)
        own = self.by_tensor(vector)  # views
        for name in self.shards.counted(parts):
            own[name][self._index(name)] = parts[name].cpu()
        return self.shards.sum(vector)


def _axis_of(unit: Unit, dimensions: int) -> int | None:
    """Returns the dimension along which units are counted; None: the tensor is one unit."""
    if unit == "tensor" or dimensions == 0:
        return None
    return 0 if dimensions == 1 or unit == "filter" else 1


def fill_greedily(scores: Tensor, sizes: Tensor, budget: int) -> Tensor:
    """Take units by decreasing score, each if it still fits: sum of sizes <= budget. All tensors: shape (units,).

    Ties go to the earlier unit; -inf is never taken. Afterwards no other unit with a score above -inf would fit.

    Each round takes a run of units by one cumulative sum. The unit that ends the run is larger than the remaining
    budget, and so are all units of its size: there are at most as many rounds as distinct sizes.
    """
    taken, waiting = torch.zeros_like(sizes, dtype=torch.bool), _in_order(scores)
    while len(waiting := waiting[sizes[waiting] <= budget]):
        running = sizes[waiting].cumsum(0)
        run = int(torch.searchsorted(running, budget, right=True))
        taken[waiting[:run]] = True
        budget -= int(running[run - 1])
        waiting = waiting[run:]
    return taken


def fill_until_reached(scores: Tensor, sizes: Tensor, budget: int) -> Tensor:
    """Take units by decreasing score until the sum of sizes reaches the budget; otherwise like `fill_greedily`."""
    taken, waiting = torch.zeros_like(sizes, dtype=torch.bool), _in_order(scores)
    before = sizes[waiting].cumsum(0) - sizes[waiting]
    taken[waiting[before < budget]] = True
    return taken


def _in_order(scores: Tensor) -> Tensor:
    """Returns the indices of scores above -inf by decreasing score, ties in order of position."""
    order = scores.argsort(descending=True, stable=True)
    return order[scores[order] > -math.inf]
