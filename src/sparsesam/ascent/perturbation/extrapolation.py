"""Extrapolates the base optimizer's last update: a perturbation without an extra pass, for any base optimizer.

    e = k * m ⊙ (w - w_before)

Each perturbed tensor has one buffer for its kept entries. Between steps it holds w_before - w. While the weights are
perturbed it holds w, from which they are restored bit for bit and the next difference is computed. All writes are in
place, so that a captured CUDA graph stays valid.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsesam.ascent.perturbation.kept_entries import kept_entries, put_entries
from sparsesam.ascent.perturbation.pieces import Target
from sparsesam.masks.packed import PackedMask


class Extrapolation:
    """Moves weights k updates ahead and back; a target's k is its ``rho``, its direction is not used.

    The order of calls in a step: ``begin``, ``move`` and ``undo`` (not in a plain step), ``save`` before the base
    optimizer's update, ``record`` after it. A step that ends early records no update, and the next step is not
    perturbed. Except for ``undo``, callers must disable autograd.
    """

    def __init__(self, back: dict[str, Tensor] | None = None) -> None:
        self.back: dict[str, Tensor] = back or {}  # w_before - w
        self._saved: dict[str, Tensor] = {}
        self._moved: list[Target] = []

    def begin(self) -> None:
        """Drop weights that were saved for an update that did not happen."""
        self._saved = {}

    def move(self, targets: Sequence[Target]) -> bool:
        """Move w to w + k (w - w_before); returns False if no update is recorded."""
        groups: dict[float, list[Target]] = {}
        for target in targets:
            if target.rho != 0 and target.name in self.back:
                groups.setdefault(float(target.rho), []).append(target)
        for k, group in groups.items():
            buffers, here = [self.back.pop(target.name) for target in group], _read(group)
            there = torch._foreach_sub(here, buffers, alpha=k)
            torch._foreach_copy_(buffers, here)
            self._saved.update(zip([target.name for target in group], buffers, strict=True))
            # Listed before they are moved, so that an interrupted move is undone too.
            self._moved += group
            _write(group, there)
        torch.clear_autocast_cache()
        return bool(groups)

    @torch.no_grad()
    def undo(self) -> None:
        """Restore w, bit for bit; after an interruption (Ctrl-C) it can be called again."""
        _write(self._moved, [self._saved[target.name] for target in self._moved])
        self._moved = []
        torch.clear_autocast_cache()

    def save(self, targets: Sequence[Target]) -> None:
        """Save w, unless `move` has already done so."""
        others = [target for target in targets if target.name not in self._saved]
        for target, here in zip(others, _read(others), strict=True):
            old = self.back.pop(target.name, None)
            self._saved[target.name] = here.clone() if old is None or old.shape != here.shape else old.copy_(here)

    def record(self, targets: Sequence[Target]) -> None:
        """Record the base optimizer's update of the targets; updates of other weights are dropped."""
        saved = [target for target in targets if target.name in self._saved]
        buffers = [self._saved.pop(target.name) for target in saved]
        if saved:
            torch._foreach_sub_(buffers, _read(saved))
        self.back = dict(zip([target.name for target in saved], buffers, strict=True))

    @torch.no_grad()
    def change_mask(self, name: str, weight: Tensor, old: PackedMask | None, new: PackedMask | None) -> None:
        """Keep the recorded updates of entries in both masks; those of entries only in the new mask are zero."""
        back = self.back.pop(name, None)
        if back is None or (new is not None and new.is_empty):
            return
        dense = put_entries(torch.zeros_like(weight), old, back)
        self.back[name] = kept_entries(dense, new).clone()


def _read(targets: Sequence[Target]) -> list[Tensor]:
    """Returns their kept entries: the weights themselves, whole rows, or vectors."""
    return [kept_entries(target.weight, target.mask) for target in targets]


def _write(targets: Sequence[Target], values: Sequence[Tensor]) -> None:
    weights, new = [], []
    for target, value in zip(targets, values, strict=True):
        if target.is_dense:
            weights.append(target.weight)
            new.append(value)
        else:
            put_entries(target.weight, target.mask, value)
    if weights:
        torch._foreach_copy_(weights, new)
