"""The explicit perturbation: mask the gradient, move the weights, bring them back bit for bit.

    e = rho * m ⊙ T² g / ||T g||          norm="full", the paper's (with T = 1)
    e = rho * m ⊙ T² g / ||m ⊙ T g||      norm="masked"

T = 1 for SAM; T = |w| + eta for the adaptive form (ASAM).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from sparsesam.masks.packed import PackedMask

Norm = Literal["full", "masked"]


@dataclass
class Target:
    """One weight tensor about to be perturbed: ``mask=None`` perturbs all of it, ``eta=None`` means T = 1."""

    weight: Tensor
    gradient: Tensor
    mask: PackedMask | None
    rho: float
    eta: float | None
    entries_saved: int = 0

    @property
    def is_dense(self) -> bool:
        return self.mask is None or self.mask.is_full

    @property
    def is_still(self) -> bool:
        return self.rho == 0 or (self.mask is not None and self.mask.is_empty)


def ascent_norm(targets: Sequence[Target], *, norm: Norm) -> float:
    """||T g|| over all targets, or over their kept entries; accumulated in at least float32."""
    parts: list[Tensor] = []
    for target in targets:
        if norm == "full" or target.is_dense:
            parts.append(_vector_norm(_scaled(target.gradient, target.weight, target.eta, power=1)))
        elif target.mask is not None and not target.mask.is_empty:
            weight, gradient = target.weight.reshape(-1), target.gradient.reshape(-1)
            for start, stop, kept in target.mask.chunks():
                entries = gradient[start:stop].index_select(0, kept)
                if target.eta is not None:
                    entries = _scaled(entries, weight[start:stop].index_select(0, kept), target.eta, power=1)
                parts.append(_vector_norm(entries))
    if not parts:
        return 0.0
    home = parts[0].device
    return float(torch.linalg.vector_norm(torch.stack([part.to(home) for part in parts])))


@dataclass
class Perturbation:
    """Adds e to the weights and can take it back exactly, because the old values of moved entries are kept.

    The buffers are kept from step to step: allocating 4 bytes per weight anew costs more than filling them.
    """

    _buffers: dict[int, Tensor] = field(default_factory=dict)
    _moved: list[Target] = field(default_factory=list)

    @property
    def active(self) -> bool:
        return bool(self._moved)

    @torch.no_grad()
    def apply(self, targets: Sequence[Target], norm: float) -> None:
        """Move w to w + e; ``norm`` is `ascent_norm` and must be positive and finite."""
        for target in targets:
            if not target.is_still:
                saved = self._buffer(target)
                if target.is_dense:
                    saved.copy_(target.weight)
                # Listed before it is moved, so that an interruption half-way is undone too.
                self._moved.append(target)
                if target.is_dense:
                    _add_dense(target, target.rho / norm)
                else:
                    _add_entries(target, saved, target.rho / norm)
            target.gradient = target.weight.new_empty(0)  # let go of g: the second pass needs the memory

    @torch.no_grad()
    def undo(self) -> None:
        """Bring back w, bit for bit; an interruption (Ctrl-C) is raised only after that."""
        try:
            self._put_back()
        except BaseException:
            self._put_back()
            raise

    def _put_back(self) -> None:
        while self._moved:
            target = self._moved[-1]
            saved = self._buffers[id(target.weight)]
            if target.is_dense:
                target.weight.copy_(saved)
            else:
                _put_entries(target, saved)
            self._moved.pop()

    def forget(self) -> None:
        """Free the buffers (after the masks or the parameters changed)."""
        self._buffers = {}

    def _buffer(self, target: Target) -> Tensor:
        weight, mask = target.weight, target.mask
        size = weight.shape if mask is None or target.is_dense else torch.Size([mask.count])
        held = self._buffers.get(id(weight))
        if held is None or (held.shape, held.dtype, held.device) != (size, weight.dtype, weight.device):
            held = torch.empty(size, dtype=weight.dtype, device=weight.device)
            self._buffers[id(weight)] = held
        return held


def _vector_norm(values: Tensor) -> Tensor:
    half = values.dtype in (torch.float16, torch.bfloat16)
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float32 if half else None)
    return norm


def _scaled(gradient: Tensor, weight: Tensor, eta: float | None, *, power: int) -> Tensor:
    if eta is None:
        return gradient
    return gradient * (weight.abs() + eta).pow_(power)


def _add_dense(target: Target, scale: float) -> None:
    if target.eta is None:
        target.weight.add_(target.gradient, alpha=scale)
    else:
        target.weight.add_(_scaled(target.gradient, target.weight, target.eta, power=2), alpha=scale)


def _add_entries(target: Target, saved: Tensor, scale: float) -> None:
    """w[kept] += scale * T² g[kept], each chunk saved (and counted as saved) before it is moved."""
    assert target.mask is not None
    gradient = target.gradient.reshape(-1)
    with _flat(target.weight) as weight:
        for start, stop, kept in target.mask.chunks():
            old = saved[target.entries_saved : target.entries_saved + len(kept)]
            torch.index_select(weight[start:stop], 0, kept, out=old)
            target.entries_saved += len(kept)
            entries = _scaled(gradient[start:stop].index_select(0, kept), old, target.eta, power=2)
            weight[start:stop].scatter_(0, kept, torch.add(old, entries, alpha=scale))


def _put_entries(target: Target, saved: Tensor) -> None:
    assert target.mask is not None
    offset = 0
    with _flat(target.weight) as weight:
        for start, stop, kept in target.mask.chunks():
            if offset == target.entries_saved:
                break
            weight[start:stop].scatter_(0, kept, saved[offset : offset + len(kept)])
            offset += len(kept)


@contextmanager
def _flat(weight: Tensor) -> Iterator[Tensor]:
    """The weight as a writable vector in row-major order, whatever its memory format."""
    if weight.is_contiguous():
        yield weight.view(-1)
        return
    copy = weight.contiguous()
    try:
        yield copy.view(-1)
    finally:
        weight.copy_(copy)
