"""The perturbation tensor by tensor, in pieces that stay in a CPU's cache; also for shards and unusual layouts.

A `HostMover` saves what it moves in buffers that are kept from step to step: allocating 4 bytes per weight anew costs
more than filling them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from sparsesam.ascent.perturbation.kept_entries import kept_entries
from sparsesam.ascent.perturbation.targets import Target
from sparsesam.ascent.plan import Norm
from sparsesam.distributed import is_sharded
from sparsesam.masks.packed import PackedMask


def norms(targets: Sequence[Target], norm: Norm) -> list[Tensor]:
    """||T g|| of each target or piece of one, over all entries or the kept ones; at least float32."""
    parts: list[Tensor] = []
    for target in targets:
        if norm == "full" or target.is_dense:
            parts.append(_vector_norm(_scaled(target.direction, target.weight, target.eta, power=1)))
        elif target.mask is not None and not target.mask.is_empty:
            with _pieces(target, write=False) as pieces:
                for weight, direction, kept, _ in pieces:
                    here = weight if target.eta is None else weight.index_select(0, kept)
                    parts.append(_vector_norm(_scaled(direction.index_select(0, kept), here, target.eta, power=1)))
    return parts


class HostMover:
    """See `sparsesam.ascent.perturbation.explicit.Perturbation`, of which this is one half."""

    def __init__(self) -> None:
        self._saved: dict[str, Tensor] = {}
        self._moved: list[Target] = []

    @property
    def active(self) -> bool:
        return bool(self._moved)

    def move(self, targets: Sequence[Target], norm: float, last: dict[str, Tensor] | None) -> None:
        """w + rho * m ⊙ T² g / norm; what was added is noted in ``last``, if given."""
        for target in targets:
            note = None if last is None else _buffer(last, target)
            self._move(target, float(target.rho) / norm, note)

    def move_by(self, targets: Sequence[Target], last: dict[str, Tensor]) -> None:
        """w + last."""
        for target in targets:
            e = last[target.name]  # like the weight, as the devices' implementation may leave it, or what is kept of it
            self._move(target, None, kept_entries(e, target.mask) if e.shape == target.weight.shape else e)

    def _move(self, target: Target, scale: float | None, last: Tensor | None) -> None:
        saved = _buffer(self._saved, target)
        if target.is_dense:
            saved.copy_(target.weight)
        # Listed before it is moved, so that an interruption half-way is undone too.
        self._moved.append(target)
        add = _add_dense if target.is_dense else _add_entries
        add(target, saved, scale, last)

    def undo(self) -> None:
        while self._moved:
            target = self._moved[-1]
            saved = self._saved[target.name]
            if target.is_dense:
                target.weight.copy_(saved)
            else:
                _put_entries(target, saved)
            self._moved.pop()

    def forget(self) -> None:
        self._saved = {}


def _buffer(held: dict[str, Tensor], target: Target) -> Tensor:
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
