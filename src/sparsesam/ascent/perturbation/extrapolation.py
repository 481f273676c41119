"""The base optimizer's last update, extrapolated: a perturbation that costs no pass and knows nothing of the base.

    e = k * m ⊙ (w - w_before)

One buffer for each perturbed tensor, with room for its kept entries only. Between steps it holds w_before - w; while
the weights are away it holds w, from which they return bit for bit, and from which the next difference is taken, in
place: the buffer stays where it is, as a captured graph needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsesam.ascent.perturbation.kept_entries import kept_entries, put_entries
from sparsesam.masks.packed import PackedMask


@dataclass(frozen=True)
class TrackedWeights:
    """Weights whose updates are followed where their masks are 1, and how far they are extrapolated.

    Without ``masks``, everywhere; otherwise no mask is full or empty. Of sharded weights they are this rank's parts.
    """

    steps_ahead: float
    names: list[str]
    weights: list[Tensor]
    masks: list[PackedMask] | None

    def only(self, wanted: Callable[[str], bool]) -> TrackedWeights:
        """Those of the wanted names."""
        if all(map(wanted, self.names)):
            return self
        chosen = [at for at, name in enumerate(self.names) if wanted(name)]
        names, weights = [self.names[at] for at in chosen], [self.weights[at] for at in chosen]
        return TrackedWeights(
            self.steps_ahead, names, weights, None if self.masks is None else [self.masks[at] for at in chosen]
        )

    def read(self) -> list[Tensor]:
        """Their kept entries: the weights themselves, whole rows, or vectors."""
        if self.masks is None:
            return self.weights
        return [kept_entries(weight, mask) for weight, mask in zip(self.weights, self.masks, strict=True)]

    def write(self, values: list[Tensor] | tuple[Tensor, ...]) -> None:
        if self.masks is None:
            torch._foreach_copy_(self.weights, values)
            return
        for weight, mask, value in zip(self.weights, self.masks, values, strict=True):
            put_entries(weight, mask, value)


def tracked_weights(weights: Iterable[tuple[str, Tensor, PackedMask | None, float]]) -> list[TrackedWeights]:
    """Names, weights, their masks (None: all is kept) and how far they go; those that go equally far together."""
    groups: dict[tuple[float, bool], TrackedWeights] = {}
    for name, weight, mask, steps_ahead in weights:
        if mask is not None and mask.is_empty:
            continue
        is_whole = mask is None or mask.is_full
        group = groups.setdefault(
            (steps_ahead, is_whole), TrackedWeights(steps_ahead, [], [], None if is_whole else [])
        )
        group.names.append(name)
        group.weights.append(weight)
        if group.masks is not None and mask is not None:
            group.masks.append(mask)
    return list(groups.values())


class Extrapolation:
    """Moves weights k updates ahead and back.

    The order of calls in a step: ``begin``, ``move`` and ``undo`` (not in a plain step), ``hold`` before the base
    optimizer's update, ``record`` after it. A step that ends early leaves no update behind, and the next one is not
    perturbed. But for ``undo``, callers have switched autograd off.
    """

    def __init__(self, back: dict[str, Tensor] | None = None) -> None:
        self.back: dict[str, Tensor] = back or {}  # w_before - w
        self._held: dict[str, Tensor] = {}
        self._moved: list[tuple[TrackedWeights, list[Tensor]]] = []

    def begin(self) -> None:
        """Let go of weights that were held for an update which did not come."""
        self._held = {}

    def move(self, tracked: Iterable[TrackedWeights]) -> bool:
        """Move w to w + k (w - w_before); False where no update is known yet."""
        ahead = _chosen((group for group in tracked if group.steps_ahead != 0), self.back.__contains__)
        for group in ahead:
            buffers = [self.back.pop(name) for name in group.names]
            here = group.read()
            there = torch._foreach_sub(here, buffers, alpha=group.steps_ahead)
            torch._foreach_copy_(buffers, here)
            self._held.update(zip(group.names, buffers, strict=True))
            # Listed before they are moved, so that an interruption half-way is undone too.
            self._moved.append((group, buffers))
            group.write(there)
        torch.clear_autocast_cache()
        return bool(ahead)

    @torch.no_grad()
    def undo(self) -> None:
        """Bring back w, bit for bit; after an interruption (Ctrl-C) it can be called again."""
        for group, buffers in self._moved:
            group.write(buffers)
        self._moved = []
        torch.clear_autocast_cache()

    def hold(self, tracked: Iterable[TrackedWeights]) -> None:
        """Keep w, where the step has not done so already."""
        for group in _chosen(tracked, lambda name: name not in self._held):
            for name, here in zip(group.names, group.read(), strict=True):
                old = self.back.pop(name, None)
                self._held[name] = here.clone() if old is None or old.shape != here.shape else old.copy_(here)

    def record(self, tracked: Iterable[TrackedWeights]) -> None:
        """The update that the base optimizer has just made."""
        for group in _chosen(tracked, self._held.__contains__):
            buffers = [self._held.pop(name) for name in group.names]
            torch._foreach_sub_(buffers, group.read())
            self.back.update(zip(group.names, buffers, strict=True))

    @torch.no_grad()
    def change_mask(self, name: str, weight: Tensor, old: PackedMask | None, new: PackedMask | None) -> None:
        """Keep the updates of entries that both masks keep; of entries that only the new one keeps none is known."""
        back = self.back.pop(name, None)
        if back is None or (new is not None and new.is_empty):
            return
        dense = put_entries(torch.zeros_like(weight), old, back)
        self.back[name] = kept_entries(dense, new).clone()


def _chosen(tracked: Iterable[TrackedWeights], wanted: Callable[[str], bool]) -> list[TrackedWeights]:
    return [group for group in (group.only(wanted) for group in tracked) if group.names]
