"""Whole tensors, filters or columns: groups of weights that are kept or dropped together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards
from sparsesam.masks.checks import check_choice
from sparsesam.masks.patterns.base import Choice, Pattern, left_after_drop, weight_budget
from sparsesam.masks.select import Tensors, check_alike, check_scores, count_true, random_scores

Unit = Literal["tensor", "filter", "column"]


@dataclass(frozen=True)
class Structured(Pattern):
    """Whole units: ``"tensor"``, ``"filter"`` (index along dim 0) or ``"column"`` (index along dim 1).

    A unit's score is the mean of its weights' scores. Units are taken by falling score while they fit into
    round((1 - sparsity) * d) weights, so the number kept is at most the budget and no further unit would fit.
    Each entry of a 1-D tensor is its own filter and column; a 0-D tensor is one unit.

    `drop_and_grow` keeps, of the kept units, what fits into kept - N_drop weights by ``keep``: at least
    N_drop weights are dropped. Random growth draws once per unit.
    """

    unit: Unit = "filter"
    knows_shards = True

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, get_args(Unit))

    def _choose(self, choice: Choice, like: Tensors, sparsity: float | None, shards: Shards) -> dict[str, Tensor]:
        units, budget = Units(self.unit, shards), weight_budget(shards, sparsity)
        return units.expand(fill_greedily(_scores(units, choice), units.sizes, budget), like)

    def _drop_and_grow(
        self, masks: Tensors, keep: Choice, grow: Choice, sparsity: float | None, ratio: float, shards: Shards
    ) -> dict[str, Tensor]:
        units, budget = Units(self.unit, shards), weight_budget(shards, sparsity)
        kept = units.kept(masks)
        left = min(left_after_drop(count_true(masks, shards), ratio), budget)
        survivors = fill_greedily(_scores(units, keep), units.sizes, left, among=kept)
        free = budget - sum(units.sizes[name] * int(mask.sum()) for name, mask in survivors.items())
        others = {name: ~mask for name, mask in survivors.items()}
        grown = fill_greedily(_scores(units, grow), units.sizes, free, among=others)
        return units.expand({name: survivors[name] | grown[name] for name in masks}, masks)


def _scores(units: Units, choice: Choice) -> dict[str, Tensor]:
    if isinstance(choice, torch.Generator):
        return random_scores({name: torch.empty(count) for name, count in units.counts.items()}, generator=choice)
    return units.means(choice)


class Units:
    """The units of tensors, which this process may hold a part of, as CPU vectors that every rank has whole.

    For a tensor of shape (O, C, ...) a filter is an index along O and a column one along C. Every entry of a 1-D tensor
    is a filter and a column of its own; a 0-D tensor is one unit. Of each unit, one number is sent.

    ``counts``: number of a tensor's units. ``sizes``: number of weights in each of them.
    """

    def __init__(self, unit: Unit, shards: Shards) -> None:
        self.unit, self.shards = unit, shards
        self.counts = {name: self._count(part.shape) for name, part in shards.parts.items()}
        self.sizes = {name: part.shape.numel() // max(1, self.counts[name]) for name, part in shards.parts.items()}

    def means(self, scores: Tensors) -> dict[str, Tensor]:
        """Mean score of every unit, in float64: sums of equal float32 scores are exact, so that equal units tie.

        One entry of -inf makes its unit -inf, also where it meets +inf.
        """
        check_scores(scores, self.shards)
        sums = self._gathered({name: self._view(score).double().sum((0, 2)) for name, score in scores.items()})
        means = {name: total / max(1, self.sizes[name]) for name, total in sums.items()}
        return {name: mean.masked_fill(mean.isnan(), -math.inf) for name, mean in means.items()}

    def kept(self, masks: Tensors) -> dict[str, Tensor]:
        """One bool per unit from masks that treat every unit as a whole; ValueError if they do not."""
        found = {}
        for name, mask in masks.items():
            view = self._view(mask)
            some = view.any(2).any(0)
            if not torch.equal(view, some[None, :, None].expand_as(view)):
                raise ValueError(
                    f"masks[{name!r}] keeps a part of a {self.unit}; drop_and_grow needs whole units, start from "
                    "select()"
                )
            found[name] = some.double()
        return {name: total > 0 for name, total in self._gathered(found).items()}

    def expand(self, kept: Tensors, like: Tensors) -> dict[str, Tensor]:
        """Masks of the shapes of ``like`` in which each entry has the value of its unit."""
        masks = {}
        for name, tensor in like.items():
            masks[name] = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
            if tensor.numel():
                self._view(masks[name])[:] = kept[name][self._index(name)].to(tensor.device)[:, None]
        return masks

    def _count(self, shape: torch.Size) -> int:
        axis = self._axis(shape)
        return 1 if axis is None else shape[axis]

    def _axis(self, shape: torch.Size) -> int | None:
        """The dimension along which units are counted; None for one unit."""
        if self.unit == "tensor" or len(shape) == 0:
            return None
        return 0 if len(shape) == 1 or self.unit == "filter" else 1

    def _view(self, tensor: Tensor) -> Tensor:
        """(before, units, after)"""
        axis, shape = self._axis(tensor.shape), tensor.shape
        if axis is None:
            return tensor.detach().reshape(1, 1, tensor.numel())
        before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        return tensor.detach().reshape(before, shape[axis], after)

    def _index(self, name: str) -> Tensor:
        """The units that this rank holds entries of."""
        part = self.shards.parts[name]
        axis = self._axis(part.shape)
        return torch.zeros(1, dtype=torch.int64) if axis is None else part.indices[axis]

    def _gathered(self, parts: Tensors) -> dict[str, Tensor]:
        """Sums over ranks of one float64 number per unit that each rank holds a part of."""
        vectors = {name: torch.zeros(count, dtype=torch.float64) for name, count in self.counts.items()}
        for name in self.shards.counted(parts):
            vectors[name][self._index(name)] = parts[name].cpu()
        if not vectors:
            return {}
        summed = self.shards.sum(torch.cat(list(vectors.values())))
        return dict(zip(vectors, summed.split(list(self.counts.values())), strict=True))


def fill_greedily(
    scores: Tensors, sizes: Mapping[str, int], budget: int, *, among: Tensors | None = None
) -> dict[str, Tensor]:
    """Walk the units by falling score and take each that still fits: sum of sizes <= budget.

    Ties go to the earlier unit; -inf is never taken. Afterwards no untaken unit (with a score, and in
    ``among``) would fit. ``sizes`` is the number of weights in each of a name's units.

    Each round takes a whole run of units by one cumulative sum. The unit that ends the run is larger than
    what is left, and so are all of its size: there are at most as many rounds as distinct sizes.
    """
    if among is not None:
        check_alike(scores, among, label="among")
    values = np.concatenate([np.empty(0), *(score.double().numpy() for score in scores.values())])
    weight = np.repeat([sizes[name] for name in scores], [len(score) for score in scores.values()])
    allowed = values > -math.inf
    if among is not None:
        allowed &= np.concatenate([np.empty(0, bool), *(mask.numpy() for mask in among.values())])
    # A stable sort of the negated scores keeps equal ones in order of position.
    waiting = np.argsort(-values, kind="stable")
    waiting = waiting[allowed[waiting]]
    taken = np.zeros(len(values), dtype=bool)
    while len(waiting := waiting[weight[waiting] <= budget]):
        running = np.cumsum(weight[waiting])
        run = int(np.searchsorted(running, budget, side="right"))
        taken[waiting[:run]] = True
        budget -= int(running[run - 1])
        waiting = waiting[run:]
    parts = torch.from_numpy(taken).split([len(score) for score in scores.values()])
    return dict(zip(scores, parts, strict=True))
