"""The explicit perturbation: mask the gradient, move the weights, bring them back bit for bit.

    e = rho * m ⊙ T² g / ||T g||          norm="full", the paper's (with T = 1)
    e = rho * m ⊙ T² g / ||m ⊙ T g||      norm="masked"

T = 1 for SAM; T = |w| + eta for the adaptive form (ASAM).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsesam.ascent.plan import Norm
from sparsesam.distributed import is_sharded
from sparsesam.masks.packed import PackedMask


@dataclass
class Target:
    """One weight tensor about to be perturbed along a direction g, usually its gradient.

    ``mask=None`` perturbs all of it, ``eta=None`` means T = 1.
    """

    name: str
    weight: Tensor
    direction: Tensor
    mask: PackedMask | None
    rho: float
    eta: float | None
    pieces_saved: int = 0

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
            parts.append(_vector_norm(_scaled(target.direction, target.weight, target.eta, power=1)))
        elif target.mask is not None and not target.mask.is_empty:
            for directions, weights in _kept(target):
                parts.append(_vector_norm(_scaled(directions, weights(), target.eta, power=1)))
    if not parts:
        return 0.0
    home = parts[0].device
    return float(torch.linalg.vector_norm(torch.stack([part.to(home) for part in parts])))


class Perturbation:
    """Adds e to the weights and can take it back exactly, because the old values of moved entries are kept.

    The buffers are kept from step to step: allocating 4 bytes per weight anew costs more than filling them.
    With ``remember`` the last e is kept as well, so that later steps can use it again.
    """

    def __init__(self, *, remember: bool = False) -> None:
        self.last: dict[str, Tensor] = {}
        self._remember = remember
        self._saved: dict[str, Tensor] = {}
        self._moved: list[Target] = []

    @property
    def active(self) -> bool:
        return bool(self._moved)

    def apply(self, targets: Sequence[Target], norm: float) -> None:
        """Move w to w + e; ``norm`` is `ascent_norm` and must be positive and finite."""
        if self._remember:
            self.last = {t.name: self._buffer({}, t) for t in targets if not t.is_still}
        self._move(targets, lambda target: target.rho / norm)

    def apply_last(self, targets: Sequence[Target]) -> None:
        """Move w to w + the last e, whatever the gradient is now."""
        self._move([target for target in targets if target.name in self.last], lambda _: None)

    @torch.no_grad()
    def _move(self, targets: Sequence[Target], scale_of: Callable[[Target], float | None]) -> None:
        for target in targets:
            if not target.is_still:
                saved = self._buffer(self._saved, target)
                if target.is_dense:
                    saved.copy_(target.weight)
                # Listed before it is moved, so that an interruption half-way is undone too.
                self._moved.append(target)
                move = _add_dense if target.is_dense else _add_entries
                move(target, saved, scale_of(target), self.last.get(target.name))
            target.direction = target.weight.new_empty(0)  # let go of g: the second pass needs the memory
        torch.clear_autocast_cache()  # a step inside of autocast would go on with the weights as they were

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
            saved = self._saved[target.name]
            if target.is_dense:
                target.weight.copy_(saved)
            else:
                _put_entries(target, saved)
            self._moved.pop()
        torch.clear_autocast_cache()

    def forget(self) -> None:
        """Free the buffers (after the masks or the parameters changed)."""
        self._saved = {}
        self.last = {}

    def _buffer(self, held: dict[str, Tensor], target: Target) -> Tensor:
        """Room for the moved entries of a target, the one in ``held`` if it fits."""
        weight, mask = target.weight, target.mask
        if mask is None or target.is_dense:
            size = weight.shape
        else:
            size = torch.Size([mask.count] if mask.rows is None else [len(mask.rows), *weight.shape[1:]])
        room = held.get(target.name)
        if room is None or (room.shape, room.dtype, room.device) != (size, weight.dtype, weight.device):
            # Like the weight itself where it is dense, so that shards are saved as shards.
            room = torch.empty_like(weight) if target.is_dense else weight.new_empty(size)
            held[target.name] = room
        return room


def _vector_norm(values: Tensor) -> Tensor:
    half = values.dtype in (torch.float16, torch.bfloat16)
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float32 if half else None)
    if is_sharded(norm):
        return norm.full_tensor()  # type: ignore[attr-defined,no-any-return]
    return norm


def _scaled(gradient: Tensor, weight: Tensor, eta: float | None, *, power: int) -> Tensor:
    if eta is None:
        return gradient
    return gradient * (weight.abs() + eta).pow_(power)


def _add_dense(target: Target, saved: Tensor, scale: float | None, last: Tensor | None) -> None:
    """w += scale * T² g, noted in ``last`` if there is one; without a scale, w += last."""
    if scale is None:
        assert last is not None
        target.weight.add_(last)
        return
    target.weight.add_(_scaled(target.direction, target.weight, target.eta, power=2), alpha=scale)
    if last is not None:
        torch.sub(target.weight, saved, out=last)


def _add_entries(target: Target, saved: Tensor, scale: float | None, last: Tensor | None) -> None:
    """The same for the kept entries, each piece saved (and counted as saved) before it is moved."""
    with _pieces(target) as pieces:
        for weight, direction, kept, here in pieces:
            old = saved[here]
            torch.index_select(weight, 0, kept, out=old)
            target.pieces_saved += 1
            if scale is None:
                assert last is not None
                new = old + last[here]
            else:
                entries = _scaled(direction.index_select(0, kept), old, target.eta, power=2)
                new = torch.add(old, entries, alpha=scale)
                if last is not None:
                    torch.sub(new, old, out=last[here])
            _write(weight, kept, new)


def _put_entries(target: Target, saved: Tensor) -> None:
    with _pieces(target) as pieces:
        for weight, _, kept, here in itertools.islice(pieces, target.pieces_saved):
            _write(weight, kept, saved[here])


def _write(weight: Tensor, kept: Tensor, values: Tensor) -> None:
    if weight.dim() == 1:  # three times faster than index_copy_ there
        weight.scatter_(0, kept, values)
    else:
        weight.index_copy_(0, kept, values)


def _kept(target: Target) -> Iterator[tuple[Tensor, Callable[[], Tensor]]]:
    """The kept directions piece by piece, with a way to get at the weights of the piece."""
    with _pieces(target, write=False) as pieces:
        for weight, direction, kept, _ in pieces:
            yield direction.index_select(0, kept), functools.partial(weight.index_select, 0, kept)


@contextmanager
def _pieces(target: Target, *, write: bool = True) -> Iterator[Iterator[tuple[Tensor, Tensor, Tensor, slice]]]:
    """(weight, direction, kept indices along dimension 0, their place among all kept) for each piece.

    A mask of whole rows is one piece whose unit is a row; any other goes in chunks of entries that stay in cache.
    """
    assert target.mask is not None
    rows = target.mask.rows
    if rows is not None:
        yield iter([(target.weight, target.direction, rows, slice(0, len(rows)))])
        return
    with _flat(target.weight, write=write) as weight:
        yield _chunks(target.mask, weight, target.direction.reshape(-1))


def _chunks(mask: PackedMask, weight: Tensor, direction: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, slice]]:
    place = 0
    for start, stop, kept in mask.chunks():
        yield weight[start:stop], direction[start:stop], kept, slice(place, place + len(kept))
        place += len(kept)


@contextmanager
def _flat(weight: Tensor, *, write: bool) -> Iterator[Tensor]:
    """The weight as a vector in row-major order, whatever its memory format; what is written to it arrives."""
    if weight.is_contiguous():
        yield weight.view(-1)
        return
    copy = weight.contiguous()
    try:
        yield copy.view(-1)
    finally:
        if write:
            weight.copy_(copy)
