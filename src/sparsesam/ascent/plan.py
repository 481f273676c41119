"""What the masks allow the ascent to leave out, parameter by parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import nn

from sparsesam.ascent.layers import WeightGradient
from sparsesam.ascent.memo import memory_of
from sparsesam.ascent.recording import Plan
from sparsesam.ascent.statistics import statistics_of
from sparsesam.masks.packed import PackedMask

Ascent = Literal["explicit", "implicit", "implicit-dense", "momentum"]


def make_plan(model: nn.Module, moved: Mapping[str, PackedMask | None], ascent: Ascent) -> Plan:
    """``moved`` holds the parameters that take part in the ascent, with their masks (None: all of it)."""
    names: dict[int, str] = {}
    perturbed: dict[int, WeightGradient | None] = {}
    still: set[int] = set()
    blocking: set[int] = set()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        names[id(parameter)] = name
        mask = moved.get(name)
        whole = name in moved and (mask is None or mask.is_full)
        empty = name not in moved or (mask is not None and mask.is_empty)
        if empty and ascent != "explicit" and parameter.dim() > 1:
            blocking.add(id(parameter))
        if empty and not (ascent == "implicit-dense" and name in moved):
            still.add(id(parameter))
        elif whole or empty or mask is None:
            perturbed[id(parameter)] = None
        else:
            perturbed[id(parameter)] = _weight_gradient(mask, ascent)
            if ascent == "explicit" and parameter.is_complex():
                perturbed[id(parameter)] = None
    # A weight in the memory of one that moves, moves too.
    moved_memory = {memory_of(one) for one in model.parameters() if id(one) in perturbed} - {None}
    for parameter in model.parameters():
        if id(parameter) in still and memory_of(parameter) in moved_memory:
            still.discard(id(parameter))
            perturbed[id(parameter)] = None
    statistics = frozenset(id(buffer) for buffer in statistics_of(model))
    memory = {memory_of(one) for one in (*model.parameters(), *model.buffers())} - {None}
    return Plan(
        names, perturbed, frozenset(still), frozenset(blocking), statistics, frozenset(memory), frozenset(moved_memory)
    )


def saves_nothing(plan: Plan) -> bool:
    return not plan.still and not plan.blocking and not any(want for want in plan.perturbed.values())


def explicit_after_all(plan: Plan, dealt_with: set[int]) -> list[str]:
    """Weights whose layer did not send its input gradient through the mask, though the ascent is implicit."""
    return [
        plan.names[key]
        for key, want in plan.perturbed.items()
        if want is not None and want.implicit and len(want.mask.shape) > 1 and key not in dealt_with
    ]


def describe(plan: Plan, reused: set[str], dealt_with: set[int] | None = None) -> dict[str, str]:
    """One line per parameter: what the ascent and the second pass did not have to compute.

    ``dealt_with`` holds the parameters of linear and convolution calls in the last step; None: before the first.
    """
    lines = {}
    for key, name in plan.names.items():
        if key in plan.still:
            text = "not perturbed: no weight gradient in the ascent"
        else:
            want = plan.perturbed[key]
            seen = dealt_with is None or key in dealt_with
            if want is None:
                text = "perturbed: full weight gradient in the ascent"
            elif not seen:
                text = "full weight gradient: not the weight of a linear or convolution call"
            elif want.rows is not None and not want.dense:
                text = f"weight gradient for {len(want.rows)} of {want.mask.shape[0]} filters"
            else:
                text = "full weight gradient: the mask is not made of whole filters"
            if want is not None and want.implicit and seen:
                text += "; input gradient through the masked weights"
        if key in plan.blocking:
            text += "; no input gradient passes"
        if name in reused:
            text += "; forward and graph of the first pass used again"
        lines[name] = text
    return lines


def _weight_gradient(mask: PackedMask, ascent: Ascent) -> WeightGradient | None:
    rows = mask.rows
    if ascent == "explicit" and rows is None:
        return None
    return WeightGradient(mask, rows, implicit=ascent != "explicit", dense=ascent == "implicit-dense")
