"""The base optimizer's last update, extrapolated: a perturbation that costs no pass and knows nothing of the base.

    e = k * m ⊙ (w - w_before)

One buffer for each perturbed tensor, with room for its kept entries only. Between steps it holds w_before - w; while
the weights are away it holds w, from which they return bit for bit, and from which the next difference is taken, in
place: the buffer stays where it is, as a captured graph needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsesam.masks.packed import PackedMask


class TrackedWeight(NamedTuple):
    """A weight whose updates are followed where its mask is 1 (None: everywhere), and how far they are extrapolated.

    Of a sharded weight it is this rank's part.
    """

    name: str
    weight: Tensor
    mask: PackedMask | None
    steps_ahead: float

    @property
    def is_still(self) -> bool:
        return self.steps_ahead == 0 or (self.mask is not None and self.mask.is_empty)


class Extrapolation:
    """Moves weights k updates ahead and back.

    The order of calls in a step: ``begin``, ``move`` and ``undo`` (not in a plain step), ``hold`` before the base
    optimizer's update, ``record`` after it. A step that ends early leaves no update behind, and the next one is not
    perturbed. But for ``undo``, callers have switched autograd off.
    """

    def __init__(self, back: dict[str, Tensor] | None = None) -> None:
        self.back: dict[str, Tensor] = back or {}  # w_before - w
        self._held: dict[str, Tensor] = {}
        self._moved: list[TrackedWeight] = []

    def begin(self) -> None:
        """Let go of weights that were held for an update which did not come."""
        self._held = {}

    def move(self, tracked: Iterable[TrackedWeight]) -> bool:
        """Move w to w + k (w - w_before); False where no update is known yet."""
        ahead = [one for one in tracked if one.name in self.back]
        for steps, group in _grouped(ahead):
            buffers = [self.back.pop(one.name) for one in group]
            here = _kept(group)
            there = torch._foreach_sub(here, buffers, alpha=steps)
            torch._foreach_copy_(buffers, here)
            self._held.update(zip((one.name for one in group), buffers, strict=True))
            # Listed before they are moved, so that an interruption half-way is undone too.
            self._moved += group
            _write(group, there)
        torch.clear_autocast_cache()
        return bool(ahead)

    @torch.no_grad()
    def undo(self) -> None:
        """Bring back w, bit for bit; an interruption (Ctrl-C) is raised only after that."""
        try:
            self._put_back()
        except BaseException:
            self._put_back()
            raise

    def _put_back(self) -> None:
        if self._moved:
            _write(self._moved, [self._held[one.name] for one in self._moved])
            self._moved = []
        torch.clear_autocast_cache()

    def hold(self, tracked: Iterable[TrackedWeight]) -> None:
        """Keep w, where the step has not done so already."""
        for one in tracked:
            if one.name not in self._held and not (one.mask is not None and one.mask.is_empty):
                here = kept_entries(one.weight, one.mask)
                old = self.back.pop(one.name, None)
                self._held[one.name] = here.clone() if old is None or old.shape != here.shape else old.copy_(here)

    def record(self, tracked: Iterable[TrackedWeight]) -> None:
        """The update that the base optimizer has just made."""
        held = [one for one in tracked if one.name in self._held]
        if held:
            buffers = [self._held.pop(one.name) for one in held]
            torch._foreach_sub_(buffers, _kept(held))
            self.back.update(zip((one.name for one in held), buffers, strict=True))

    @torch.no_grad()
    def change_mask(self, name: str, weight: Tensor, old: PackedMask | None, new: PackedMask | None) -> None:
        """Keep the updates of entries that both masks keep; of entries that only the new one keeps none is known."""
        back = self.back.pop(name, None)
        if back is None or (new is not None and new.is_empty):
            return
        dense = torch.zeros_like(weight)
        _write([TrackedWeight(name, dense, old, 0.0)], [back])
        self.back[name] = kept_entries(dense, new).clone()


def kept_entries(weight: Tensor, mask: PackedMask | None) -> Tensor:
    """The weight itself where all of it is kept, whole rows if the mask is made of them, otherwise a vector."""
    if mask is None or mask.is_full:
        return weight
    if mask.rows is not None:
        return weight.index_select(0, mask.rows)
    return weight.masked_select(mask.unpack(weight.device))


def _kept(tracked: Sequence[TrackedWeight]) -> list[Tensor]:
    return [one.weight if one.mask is None else kept_entries(one.weight, one.mask) for one in tracked]


def _write(tracked: Sequence[TrackedWeight], values: Sequence[Tensor]) -> None:
    """Put values in the place of kept entries, where all are kept with few launches."""
    whole: tuple[list[Tensor], list[Tensor]] = ([], [])
    for (_, weight, mask, _), value in zip(tracked, values, strict=True):
        if mask is None or mask.is_full:
            whole[0].append(weight)
            whole[1].append(value)
        elif mask.rows is not None:
            weight.index_copy_(0, mask.rows, value)
        else:
            weight.masked_scatter_(mask.unpack(weight.device), value)
    if whole[0]:
        torch._foreach_copy_(*whole)


def _grouped(tracked: Iterable[TrackedWeight]) -> Iterator[tuple[float, list[TrackedWeight]]]:
    """Those that go equally far, together."""
    groups: dict[float, list[TrackedWeight]] = {}
    for one in tracked:
        groups.setdefault(one.steps_ahead, []).append(one)
    yield from groups.items()
