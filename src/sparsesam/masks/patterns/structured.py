"""Patterns of whole tensors, filters or columns: units of weights that are kept or dropped together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
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
    knows_shards = True

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, get_args(Unit))
        check_choice("rounding", self.rounding, ("below", "reach"))

    def _grow(self, choice: Choice, first: Tensors | None, like: Tensors, sparsity: float, shards: Shards) -> BoolMasks:
        units = Units(self.unit, shards)
        kept = None if first is None else units.kept(first)
        budget = weight_budget(shards, sparsity)
        fill = fill_greedily if self.rounding == "below" else fill_until_reached
        return units.expand(fill(units.scores(choice), units.sizes, budget, first=kept), like)

    def _drop(self, keep: Choice, masks: Tensors, sparsity: float, ratio: float, shards: Shards) -> BoolMasks:
        units = Units(self.unit, shards)
        left = left_after_drop(count_true(masks, shards), ratio)
        if self.rounding == "below":  # otherwise, masks larger than the budget are as asked
            left = min(left, weight_budget(shards, sparsity))
        return units.expand(fill_greedily(units.scores(keep), units.sizes, left, among=units.kept(masks)), masks)


class Units:
    """The units of tensors, which may be sharded, as CPU vectors that every rank holds as a whole.

    For a tensor of shape (O, C, ...) a filter is an index along O, a column an index along C. Every entry of a 1-D
    tensor is its own filter and column; a 0-D tensor is one unit. Ranks exchange one number per unit.

    ``counts``: the number of units of each tensor. ``sizes``: the number of weights in each of its units.
    """

    def __init__(self, unit: Unit, shards: Shards) -> None:
        self.unit, self.shards = unit, shards
        shapes = {name: part.shape for name, part in shards.parts.items()}
        self._axes = {name: _axis_of(unit, len(shape)) for name, shape in shapes.items()}
        self.counts = {name: 1 if axis is None else shapes[name][axis] for name, axis in self._axes.items()}
        self.sizes = {name: shape.numel() // max(1, self.counts[name]) for name, shape in shapes.items()}

    def scores(self, choice: Choice) -> dict[str, Tensor]:
        """Returns for each unit a random number or, in float64, the mean score.

        Sums of equal float32 scores are exact in float64, so that equal units tie. An entry of -inf makes its unit
        -inf, even if the unit also holds +inf.
        """
        if isinstance(choice, torch.Generator):
            return random_scores({name: torch.empty(count) for name, count in self.counts.items()}, generator=choice)
        check_scores(choice, self.shards)
        sums = self._gathered({name: self._view(name, score).double().sum((0, 2)) for name, score in choice.items()})
        means = {name: total / max(1, self.sizes[name]) for name, total in sums.items()}
        return {name: mean.masked_fill(mean.isnan(), -math.inf) for name, mean in means.items()}

    def kept(self, masks: Tensors) -> BoolMasks:
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
        return {name: total > 0 for name, total in self._gathered(found).items()}

    def expand(self, kept: Tensors, like: Tensors) -> BoolMasks:
        """Returns masks shaped like ``like``, in which each entry has the value of its unit."""
        masks = {}
        for name, tensor in like.items():
            masks[name] = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
            if tensor.numel():
                self._view(name, masks[name])[:] = kept[name][self._index(name)].to(tensor.device)[:, None]
        return masks

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

    def _gathered(self, parts: Tensors) -> dict[str, Tensor]:
        """Sum one float64 number per unit over all ranks."""
        vectors = {name: torch.zeros(count, dtype=torch.float64) for name, count in self.counts.items()}
        for name in self.shards.counted(parts):
            vectors[name][self._index(name)] = parts[name].cpu()
        if not vectors:
            return {}
        summed = self.shards.sum(torch.cat(list(vectors.values())))
        return dict(zip(vectors, summed.split(list(self.counts.values())), strict=True))


def _axis_of(unit: Unit, dimensions: int) -> int | None:
    """Returns the dimension along which units are counted; None: the tensor is one unit."""
    if unit == "tensor" or dimensions == 0:
        return None
    return 0 if dimensions == 1 or unit == "filter" else 1


def fill_greedily(
    scores: Tensors,
    sizes: Mapping[str, int],
    budget: int,
    *,
    among: Tensors | None = None,
    first: Tensors | None = None,
) -> BoolMasks:
    """Take units by decreasing score, each if it still fits: sum of sizes <= budget.

    Ties go to the earlier unit; -inf is never taken. Afterwards no other unit (with a score above -inf, and in
    ``among``) would fit. Units of ``first`` are taken before all others. ``sizes`` is the number of weights in each of
    a tensor's units.

    Each round takes a run of units by one cumulative sum. The unit that ends the run is larger than the remaining
    budget, and so are all units of its size: there are at most as many rounds as distinct sizes.
    """
    taken, waiting, size = _in_order(scores, sizes, among, first)
    budget -= int(size[taken].sum())
    while len(waiting := waiting[size[waiting] <= budget]):
        running = np.cumsum(size[waiting])
        run = int(np.searchsorted(running, budget, side="right"))
        taken[waiting[:run]] = True
        budget -= int(running[run - 1])
        waiting = waiting[run:]
    return _split(taken, scores)


def fill_until_reached(
    scores: Tensors, sizes: Mapping[str, int], budget: int, *, first: Tensors | None = None
) -> BoolMasks:
    """Take units by decreasing score until the sum of sizes reaches the budget; otherwise like `fill_greedily`."""
    taken, waiting, size = _in_order(scores, sizes, None, first)
    before = int(size[taken].sum()) + np.cumsum(size[waiting]) - size[waiting]
    taken[waiting[before < budget]] = True
    return _split(taken, scores)


def _in_order(
    scores: Tensors, sizes: Mapping[str, int], among: Tensors | None, first: Tensors | None
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns which units are in ``first``, the indices of the others by decreasing score, and the size of all."""
    size = np.repeat([sizes[name] for name in scores], [len(score) for score in scores.values()])
    values = np.concatenate([np.empty(0), *(score.double().numpy() for score in scores.values())])
    values[~_joined(among, scores, default=True)] = -math.inf
    taken = _joined(first, scores, default=False)
    # A stable sort of the negated scores keeps equal ones in order of position.
    order = np.argsort(-values, kind="stable")
    return taken, order[(values > -math.inf)[order] & ~taken[order]], size


def _joined(masks: Tensors | None, scores: Tensors, *, default: bool) -> npt.NDArray[np.bool_]:
    flags = [np.full(len(score), default) if masks is None else masks[name].numpy() for name, score in scores.items()]
    return np.concatenate([np.empty(0, dtype=bool), *flags])


def _split(taken: npt.NDArray[np.bool_], scores: Tensors) -> BoolMasks:
    return dict(zip(scores, torch.from_numpy(taken).split([len(score) for score in scores.values()]), strict=True))
