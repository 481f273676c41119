"""What the ascent can leave out under the current masks, per parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from sparsesam.ascent.graph import memory_of
from sparsesam.ascent.kinds import Ascent, Norm
from sparsesam.ascent.layers import WeightGradient
from sparsesam.masks.packed import PackedMask


@dataclass(frozen=True)
class Plan:
    """What the masks of one step mean for each trainable parameter of the model; parameters are identified by id()."""

    names: Mapping[int, str]
    #: parameters whose gradient the ascent uses; the first backward computes no other gradient
    needed: tuple[Tensor, ...]
    #: parameters that the ascent moves; what was computed before their first use can be reused
    moved: frozenset[int]
    moved_memory: frozenset[int | None]
    #: weights whose layer computes dW for some filters only, or dX through the masked weights
    sliced: Mapping[int, WeightGradient]

    @cached_property
    def needs_only_moved(self) -> bool:
        """Whether the ascent uses only gradients of parameters that it moves, as with norm="masked"."""
        return all(id(parameter) in self.moved for parameter in self.needed)

    @cached_property
    def is_explicit(self) -> bool:
        """Whether gradients are those of the loss, not computed through masked weights."""
        return not any(want.implicit for want in self.sliced.values())

    @cached_property
    def implicit(self) -> list[int]:
        """The perturbed weights whose layer computes dX through the masked weights."""
        return [key for key, want in self.sliced.items() if want.implicit and not want.mask.is_empty]

    @cached_property
    def is_partial(self) -> bool:
        """Whether the first backward leaves out any gradient."""
        return len(self.needed) < len(self.names) or bool(self.sliced)


def make_plan(model: nn.Module, masks: Mapping[str, PackedMask | None], ascent: Ascent, norm: Norm) -> Plan:
    """Returns the plan; ``masks`` holds the perturbed parameters and their masks (None: the whole parameter)."""
    names: dict[int, str] = {}
    needed: list[Tensor] = []
    moved: dict[int, Tensor] = {}
    sliced: dict[int, WeightGradient] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        names[id(parameter)] = name
        takes_part = name in masks
        mask = masks[name] if takes_part else PackedMask(parameter.shape, 0, None)
        is_empty = mask is not None and mask.is_empty
        if not is_empty or (takes_part and ascent == "implicit-dense"):
            moved[id(parameter)] = parameter
        if id(parameter) in moved or (takes_part and norm == "full"):
            needed.append(parameter)
        want = None if mask is None else weight_gradient(mask, parameter, ascent, norm, takes_part=takes_part)
        if want is not None:
            sliced[id(parameter)] = want
    moved_memory = frozenset(memory_of(parameter) for parameter in moved.values()) - {None}
    # A weight that shares memory with a moved weight moves too.
    shared = (id(p) for p in model.parameters() if memory_of(p) in moved_memory)
    return Plan(names, tuple(needed), frozenset(moved) | frozenset(shared), moved_memory, sliced)


def weight_gradient(
    mask: PackedMask, weight: Tensor, ascent: Ascent, norm: Norm, *, takes_part: bool = True
) -> WeightGradient | None:
    """Returns how a layer can compute its gradients at lower cost; None: it cannot.

    ``takes_part``: the optimizer perturbs this weight, unless the mask is empty.
    """
    if mask.is_full or weight.dim() < 2:
        return None
    if ascent == "explicit" and (mask.rows is None or norm == "full" or weight.is_complex()):
        return None
    dense = takes_part and (ascent == "implicit-dense" or (mask.is_empty and norm == "full"))
    return WeightGradient(mask, implicit=ascent != "explicit", dense=dense)
