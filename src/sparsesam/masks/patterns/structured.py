"""Patterns of whole tensors, filters or columns: units of weights that are kept or dropped together."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards
from sparsesam.masks.patterns.base import Pattern
from sparsesam.masks.select import BoolMasks, Tensors, Unit, axis_of, check_scores
from sparsesam.utils.checks import check_choice


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

    def _drop(self, keep: Tensors, masks: Tensors, sparsity: float, ratio: float, shards: Shards) -> BoolMasks:
        if self.rounding == "reach":  # masks may exceed the budget
            return replace(self, rounding="below")._drop(keep, masks, 0.0, ratio, shards)
        return super()._drop(keep, masks, sparsity, ratio, shards)

    def _best(self, scores: Tensors, count: int, among: Tensors | None, shards: Shards) -> BoolMasks:
        units = Units(self.unit, shards)
        of_units = units.scores(scores)
        if among is not None:
            of_units[~units.kept(among)] = -math.inf
        fill = fill_greedily if self.rounding == "below" else fill_until_reached
        return units.expand(units.by_tensor(fill(of_units, units.sizes, count)), scores)


class Units:
    """The units of all tensors, which may be sharded, as CPU vectors that every rank holds as a whole.

    For a tensor of shape (O, C, ...) a filter is an index along O, a column an index along C. Every entry of a 1-D
    tensor is its own filter and column; a 0-D tensor is one unit. Ranks exchange one number per unit.

    ``sizes``: the number of weights of each unit, shape (units,).
    """

    def __init__(self, unit: Unit, shards: Shards) -> None:
        self.unit, self.shards = unit, shards
        shapes = {name: part.shape for name, part in shards.parts.items()}
        self._axes = {name: axis_of(unit, len(shape)) for name, shape in shapes.items()}
        self._counts = {name: 1 if axis is None else shapes[name][axis] for name, axis in self._axes.items()}
        sizes = [shape.numel() // max(1, self._counts[name]) for name, shape in shapes.items()]
        counts = torch.tensor(list(self._counts.values()), dtype=torch.int64)
        self.sizes = torch.tensor(sizes, dtype=torch.int64).repeat_interleave(counts)

    def scores(self, scores: Tensors) -> Tensor:
        """Returns for each unit the mean score, in float64.

        Sums of equal float32 scores are exact in float64, so that equal units tie. An entry of -inf makes its unit
        -inf, even if the unit also holds +inf.
        """
        check_scores(scores, self.shards)
        sums = self._gathered({name: self._view(name, score).double().sum((0, 2)) for name, score in scores.items()})
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

    def expand(self, kept: Tensors, like: Tensors) -> BoolMasks:
        """Returns masks shaped like ``like``, in which each entry has the value of its unit."""
        masks = {}
        for name, tensor in like.items():
            masks[name] = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
            if tensor.numel():
                own = kept[name].reshape(-1)[self._index(name)]
                self._view(name, masks[name])[:] = own.to(tensor.device)[:, None]
        return masks

    def by_tensor(self, values: Tensor) -> dict[str, Tensor]:
        """Split a vector of all units into views, one of each tensor: (units, 1) if it is a matrix or larger."""
        views = values.split(list(self._counts.values())) if self._counts else ()
        parts = self.shards.parts.items()
        return {name: v[:, None] if len(part.shape) > 1 else v for (name, part), v in zip(parts, views, strict=True)}

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
            own[name].view(-1)[self._index(name)] = parts[name].cpu()
        return self.shards.sum(vector)


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
