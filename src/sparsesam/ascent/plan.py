"""What the masks let the ascent leave out, parameter by parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from sparsesam.ascent.graph import memory_of
from sparsesam.ascent.layers import WeightGradient
from sparsesam.masks.packed import PackedMask

Ascent = Literal["explicit", "implicit", "implicit-dense", "momentum", "momentum-climbing", "extrapolation"]
#: Ascents that need no gradient at w, so that a step is one pass at w + e.
ONE_PASS = ("momentum", "momentum-climbing", "extrapolation")
Norm = Literal["full", "masked"]


@dataclass(frozen=True)
class Plan:
    """What one step's masks mean for each trainable parameter of the model; parameters are told by identity."""

    names: Mapping[int, str]
    #: parameters whose gradient the ascent uses: the first backward computes no other
    needed: tuple[Tensor, ...]
    #: parameters that change in the ascent: what was computed before their first use can be used again
    moved: frozenset[int]
    moved_memory: frozenset[int | None]
    #: weights whose gradient the layer computes for some filters only, or sends back through the mask
    sliced: Mapping[int, WeightGradient]
    #: with the implicit form: weights through which no input gradient passes
    blocking: frozenset[int]

    @property
    def needs_only_moved(self) -> bool:
        """Whether every gradient that the ascent uses is of a parameter that it moves: so it is with norm="masked"."""
        return all(id(parameter) in self.moved for parameter in self.needed)

    @property
    def is_explicit(self) -> bool:
        """Whether its gradients are the loss's own, and not what came through masked weights."""
        return not (self.blocking or any(want.implicit for want in self.sliced.values()))

    @property
    def is_partial(self) -> bool:
        """Whether the first backward computes less than every gradient."""
        return len(self.needed) < len(self.names) or bool(self.sliced) or bool(self.blocking)


def make_plan(model: nn.Module, masks: Mapping[str, PackedMask | None], ascent: Ascent, norm: Norm) -> Plan:
    """``masks`` holds the parameters that take part in the ascent, with their masks (None: all of it)."""
    names: dict[int, str] = {}
    needed: list[Tensor] = []
    moved: dict[int, Tensor] = {}
    sliced: dict[int, WeightGradient] = {}
    blocking: set[int] = set()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        names[id(parameter)] = name
        mask = masks.get(name)
        takes_part = name in masks
        is_empty = not takes_part or (mask is not None and mask.is_empty)
        if ascent != "explicit" and is_empty and parameter.dim() > 1:
            blocking.add(id(parameter))
        moves = not is_empty or (takes_part and ascent == "implicit-dense")
        if moves:
            moved[id(parameter)] = parameter
        if moves or (takes_part and norm == "full"):
            needed.append(parameter)
        if moves and mask is not None and not is_empty:
            want = weight_gradient(mask, parameter, ascent, norm)
            if want is not None:
                sliced[id(parameter)] = want
    moved_memory = frozenset(memory_of(parameter) for parameter in moved.values()) - {None}
    # A weight in the memory of one that moves, moves too.
    shared = (id(p) for p in model.parameters() if memory_of(p) in moved_memory)
    return Plan(names, tuple(needed), frozenset(moved) | frozenset(shared), moved_memory, sliced, frozenset(blocking))


def weight_gradient(mask: PackedMask, weight: Tensor, ascent: Ascent, norm: Norm) -> WeightGradient | None:
    """How a layer may compute the gradient of its weight for less; None: not at all."""
    if mask.is_full or mask.is_empty or weight.dim() < 2:
        return None
    if ascent == "explicit" and (mask.rows is None or norm == "full" or weight.is_complex()):
        return None
    return WeightGradient(mask, mask.rows, implicit=ascent != "explicit", dense=ascent == "implicit-dense")
