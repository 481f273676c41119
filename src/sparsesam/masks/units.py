"""Groups of weights that are kept or dropped together: tensors, filters, columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from sparsesam.masks.select import Array, check_alike, native, raise_nan

Unit = Literal["tensor", "filter", "column"]

_BLOCK = 1 << 16


def unit_scores(scores: Mapping[str, Tensor], unit: Unit) -> dict[str, Tensor]:
    """Mean score of every unit, in float64: name -> 1-D tensor with one entry per unit.

    For a tensor of shape (O, C, ...) a filter is an index along O and a column one along C. Every entry of a
    1-D tensor is a filter and a column of its own. One entry of -inf makes its unit -inf.
    """
    return {name: _means(name, tensor.detach(), unit) for name, tensor in scores.items()}


def unit_masks(masks: Mapping[str, Tensor], unit: Unit) -> dict[str, Tensor]:
    """One bool per unit from masks that treat every unit as a whole; ValueError if they do not."""
    units = {}
    for name, mask in masks.items():
        if mask.numel() == 0:
            units[name] = mask.new_zeros(unit_count(mask.shape, unit))
            continue
        view = _unit_view(mask, unit)
        kept = view[0, :, 0]
        if not bool((view == kept[None, :, None]).all()):
            raise ValueError(
                f"masks[{name!r}] keeps a part of a {unit}; drop_and_grow needs whole units, start from select()"
            )
        units[name] = torch.as_tensor(kept).clone()
    return units


def spread(units: Mapping[str, Tensor], like: Mapping[str, Tensor], unit: Unit) -> dict[str, Tensor]:
    """Contiguous masks of the shapes of ``like`` in which each entry has the value of its unit."""
    masks = {}
    for name, tensor in like.items():
        mask = torch.empty(tensor.shape, dtype=torch.bool, device=tensor.device)
        if mask.numel():
            kept = native(units[name].to(tensor.device))
            _unit_view(mask, unit)[...] = kept[None, :, None]
        masks[name] = mask
    return masks


def unit_count(shape: torch.Size, unit: Unit) -> int:
    """Number of units of a tensor of that shape."""
    if unit == "tensor" or len(shape) == 0:
        return 1
    return shape[0] if len(shape) == 1 or unit == "filter" else shape[1]


def fill_greedily(
    scores: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    budget: int,
    *,
    among: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Walk the units by falling score and take each that still fits: sum of sizes <= budget.

    Ties go to the earlier unit; -inf is never taken. Afterwards no untaken unit (with a score, and in
    ``among``) would fit. ``sizes`` is the number of weights in each of a name's units.

    Each round takes a whole run of units by one cumulative sum. The unit that ends the run is larger than
    what is left, and so are all of its size: there are at most as many rounds as distinct sizes.
    """
    if among is not None:
        check_alike(scores, among, label="among")
    values = np.concatenate([np.empty(0), *(score.cpu().double().numpy() for score in scores.values())])
    weight = np.repeat([sizes[name] for name in scores], [len(score) for score in scores.values()])
    allowed = values > -math.inf
    if among is not None:
        allowed &= np.concatenate([np.empty(0, bool), *(mask.cpu().numpy() for mask in among.values())])
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
    parts = np.split(taken, np.cumsum([len(score) for score in scores.values()]))
    return {
        name: torch.from_numpy(part).to(score.device)
        for (name, score), part in zip(scores.items(), parts, strict=False)
    }


def _unit_view(tensor: Tensor, unit: Unit) -> Array:
    """View of shape (before, units, after); a numpy array on the CPU."""
    flat = native(tensor)
    if unit == "tensor" or tensor.ndim == 0:
        return flat.reshape(1, 1, -1)
    if tensor.ndim == 1 or unit == "filter":
        return flat.reshape(1, tensor.shape[0], -1)
    return flat.reshape(tensor.shape[0], tensor.shape[1], -1)


def unit_sums(tensor: Tensor, unit: Unit) -> Tensor:
    """The sum of every unit, in float64: sums of equal float32 scores are exact, so that equal units tie."""
    view = _unit_view(tensor, unit)
    if isinstance(view, np.ndarray):
        return torch.from_numpy(_host_sums(view))
    total: Tensor = view.sum(dim=(0, 2), dtype=torch.float64)
    return total


def forbid_undefined(means: Tensor) -> Tensor:
    """Where +inf and -inf met in one unit: never choosing one of its entries forbids the unit."""
    return means.masked_fill_(means.isnan(), -math.inf)


def _means(name: str, tensor: Tensor, unit: Unit) -> Tensor:
    if tensor.numel() == 0:
        return torch.zeros(unit_count(tensor.shape, unit), dtype=torch.float64, device=tensor.device)
    total = unit_sums(tensor, unit)
    mean = total / (tensor.numel() // total.numel())
    if bool(mean.isnan().any()) and bool(tensor.isnan().any()):
        raise_nan(name)
    return forbid_undefined(mean)


def _host_sums(view: Array) -> Array:
    """Sum over the first and last axis in float64, in blocks that stay in cache."""
    before, units, after = view.shape
    total = np.zeros(units)
    rows, columns, width = max(1, _BLOCK // (units * after)), max(1, _BLOCK // after), min(_BLOCK, after)
    with np.errstate(invalid="ignore"):
        for top in range(0, before, rows):
            for left in range(0, units, columns):
                for start in range(0, after, width):
                    block = view[top : top + rows, left : left + columns, start : start + width]
                    total[left : left + columns] += block.astype(np.float64).sum(axis=0).sum(axis=1)
    return total
