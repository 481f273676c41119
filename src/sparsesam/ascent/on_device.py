"""The perturbation on an accelerator: few launches whatever the number of tensors, and nothing read by the host.

Tensors of one device, dtype, rho and eta move together: their directions become one vector, on which the maths runs.
A mask's kept entries are gathered and written by the index that was made with the mask. The norm stays on the device,
and so does the rule for a norm that is zero or not finite, with which nothing moves:

    e = rho / norm * T² g  where 0 < norm < inf,  else 0
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsesam.ascent.plan import Norm
from sparsesam.ascent.targets import Target
from sparsesam.masks.packed import KeptIndex, PackedMask, bit_values, in_memory_order, is_dense

#: Entries that are moved at a time: room for one such vector is all that is needed beside what is saved.
CHUNK = 1 << 23

_HALF = (torch.float16, torch.bfloat16)


def can_move(target: Target) -> bool:
    """Whether the layout of the weight allows it."""
    return is_dense(target.weight)


# ---- maths: tensors in, tensors out; compiles with fullgraph=True -------------------------------------------


def is_usable(norm: Tensor) -> Tensor:
    """0 < norm < inf"""
    return (norm > 0) & (norm < math.inf)


def scale_of(rho: float | Tensor, norm: float | Tensor, device: torch.device) -> tuple[float | Tensor, Tensor | None]:
    """rho / norm, and whether the norm is not usable; None: a number, which the host has seen to be."""
    if not isinstance(norm, Tensor):
        return rho / norm, None
    norm = norm.to(device)
    return rho / norm, ~is_usable(norm)


def joined(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
    """All entries in one new vector, each tensor in the memory order of the one it is like."""
    return torch.cat([_flat(one, other.stride()) for one, other in zip(tensors, like, strict=True)])


def parted(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of the vector that look like those tensors: the inverse of `joined`."""
    pieces = vector.split([one.numel() for one in like])
    return [piece.as_strided(one.shape, one.stride()) for piece, one in zip(pieces, like, strict=True)]


def scaled_directions(directions: Tensor, weights: Tensor | None, *, eta: float | None, power: int) -> Tensor:
    """T^power g of vectors, with T = |w| + eta; in place. ``weights`` may be left out where eta is None."""
    if eta is None or weights is None:
        return directions
    return directions.mul_((weights.abs() + eta).pow_(power))


def perturbation(scaled: Tensor, scale: float | Tensor, unusable: Tensor | None, dtype: torch.dtype) -> Tensor:
    """e = scale * T² g, zero where the norm is not usable; in place of T² g unless that is of half precision."""
    # A scale of half precision would be off by up to 0.4 %, or overflow.
    e = (scaled.float() if scaled.dtype in _HALF else scaled).mul_(scale)
    if unusable is not None:
        e.masked_fill_(unusable, 0)  # whatever the scale: zero times NaN is NaN
    return e.to(dtype)


def group_norms(directions: Sequence[Tensor], weights: Sequence[Tensor], *, eta: float | None) -> list[Tensor]:
    """||T g|| of each tensor, in at least float32."""
    wide = torch.float32 if directions[0].dtype in _HALF else None
    if eta is None:
        return list(torch._foreach_norm(list(directions), 2, dtype=wide))
    scales = torch._foreach_abs(list(weights))
    torch._foreach_add_(scales, eta)
    torch._foreach_mul_(scales, list(directions))
    return list(torch._foreach_norm(scales, 2, dtype=wide))


def _flat(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    if tensor.stride() == stride and is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return in_memory_order(tensor, stride)


# ---- groups of targets --------------------------------------------------------------------------------------


@dataclass
class Group(ABC):
    """Targets of one device, dtype, rho and eta, which move together; ``saved`` holds w as a vector while they do."""

    targets: list[Target]
    indices: list[KeptIndex | None]
    saved: Tensor | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(target.name for target in self.targets)

    @property
    def weights(self) -> list[Tensor]:
        return [target.weight.detach() for target in self.targets]

    def scaled(self, *, power: int) -> Tensor:
        """T^power g of the entries that move, as one vector."""
        eta = self.targets[0].eta
        directions = self.gather([target.direction for target in self.targets])
        weights = None if eta is None else self.gather(self.weights)
        return scaled_directions(directions, weights, eta=eta, power=power)

    @abstractmethod
    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """The entries that move, of tensors like the weights, as one new vector."""

    @abstractmethod
    def save(self, room: Tensor) -> None:
        """Copy the entries of w that move into ``room``, and keep it."""

    @abstractmethod
    def add(self, e: Tensor) -> None:
        """w += e, in the entries that move; ``e`` is used up."""

    @abstractmethod
    def restore(self) -> None:
        """Bring back what was saved."""

    @abstractmethod
    def added(self) -> dict[str, Tensor]:
        """w + e - w by name: like the weight, or its kept entries in row-major order, or its kept rows."""

    @abstractmethod
    def given(self, last: dict[str, Tensor]) -> Tensor:
        """What `added` gave, here or by the host's implementation, as the vector that `add` takes."""


class WholeGroup(Group):
    """Tensors that are saved whole; where a mask of bits drops entries, their e is zero."""

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        vector = joined(tensors, self.weights)
        if all(index is None for index in self.indices):
            return vector
        values = bit_values(vector.device)
        for index, piece in zip(self.indices, vector.split([w.numel() for w in self.weights]), strict=True):
            if index is not None:
                dropped = (index.values[:, None] & values).eq(0).view(-1)
                piece.masked_fill_(dropped[: piece.numel()], 0)
        return vector

    def save(self, room: Tensor) -> None:
        self.saved = torch.cat([_flat(weight, weight.stride()) for weight in self.weights], out=room)

    def add(self, e: Tensor) -> None:
        torch._foreach_add_(self.weights, parted(e, self.weights))

    def restore(self) -> None:
        assert self.saved is not None
        torch._foreach_copy_(self.weights, parted(self.saved, self.weights))

    def added(self) -> dict[str, Tensor]:
        assert self.saved is not None
        moved = joined(self.weights, self.weights).sub_(self.saved)
        return dict(zip(self.names, parted(moved, self.weights), strict=True))

    def given(self, last: dict[str, Tensor]) -> Tensor:
        return joined([_like_weight(target, last[target.name]) for target in self.targets], self.weights)


class EntryGroup(Group):
    """Tensors of which only the kept entries or rows are saved and moved."""

    @property
    def lengths(self) -> list[int]:
        return [target.mask.count if target.mask is not None else 0 for target in self.targets]

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        return self._gather(tensors, tensors[0].new_empty(sum(self.lengths)))

    def save(self, room: Tensor) -> None:
        self.saved = self._gather(self.weights, room)

    def add(self, e: Tensor) -> None:
        assert self.saved is not None
        self._write(e.add_(self.saved))

    def restore(self) -> None:
        assert self.saved is not None
        self._write(self.saved)

    def added(self) -> dict[str, Tensor]:
        assert self.saved is not None
        found = {}
        moved = self.gather(self.weights).sub_(self.saved)
        for target, index, piece in zip(self.targets, self.indices, moved.split(self.lengths), strict=True):
            weight = target.weight
            assert index is not None
            if index.kind == "rows":
                found[target.name] = piece.view(-1, *weight.shape[1:])
            elif weight.is_contiguous():
                found[target.name] = piece
            else:
                whole = torch.zeros_like(weight)
                _flat(whole, weight.stride()).index_put_((index.values,), piece)
                found[target.name] = whole
        return found

    def given(self, last: dict[str, Tensor]) -> Tensor:
        pieces = []
        for target, index in zip(self.targets, self.indices, strict=True):
            e, weight = last[target.name], target.weight
            in_order = index is not None and (index.kind == "rows" or weight.is_contiguous())
            if e.shape == weight.shape or not in_order:
                e = EntryGroup([target], [index]).gather([_like_weight(target, e)])
            pieces.append(e.reshape(-1))
        return torch.cat(pieces)

    def _gather(self, tensors: Sequence[Tensor], out: Tensor) -> Tensor:
        for tensor, weight, index, piece in zip(
            tensors, self.weights, self.indices, out.split(self.lengths), strict=True
        ):
            assert index is not None
            if index.kind == "rows":
                torch.index_select(tensor, 0, index.values, out=piece.view(-1, *weight.shape[1:]))
            else:
                torch.index_select(_flat(tensor, weight.stride()), 0, index.values, out=piece)
        return out

    def _write(self, vector: Tensor) -> None:
        for weight, index, piece in zip(self.weights, self.indices, vector.split(self.lengths), strict=True):
            assert index is not None
            if index.kind == "rows":
                weight.index_copy_(0, index.values, piece.view(-1, *weight.shape[1:]))
            else:
                _flat(weight, weight.stride()).index_put_((index.values,), piece)


def _identity(rho: float | Tensor) -> float | tuple[str, int]:
    return ("tensor", id(rho)) if isinstance(rho, Tensor) else rho


def _like_weight(target: Target, e: Tensor) -> Tensor:
    """An e of kept entries or rows, laid out like the weight."""
    if e.shape == target.weight.shape:
        return e
    assert target.mask is not None
    whole = torch.zeros(target.weight.shape, dtype=e.dtype, device=e.device)
    return whole.masked_scatter_(target.mask.unpack(e.device), e)


class DeviceMover:
    """See `sparsesam.ascent.explicit.Perturbation`, of which this is one half."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[str, ...], Tensor] = {}
        self._moved: list[Group] = []
        self._indexed: dict[str, tuple[PackedMask, PackedMask]] = {}

    @property
    def active(self) -> bool:
        return bool(self._moved)

    def norms(self, targets: Sequence[Target], norm: Norm) -> list[Tensor]:
        """||T g|| of each target or group of them, over all entries or the kept ones; at least float32."""
        counted = targets if norm == "full" else [t for t in targets if t.mask is None or not t.mask.is_empty]
        whole = [target for target in counted if norm == "full" or target.is_dense]
        masked = [target for target in counted if norm == "masked" and not target.is_dense]
        parts = []
        for group in self._groups(whole, by_rho=False, by_mask=False):
            directions = [target.direction for target in group.targets]
            parts += group_norms(directions, group.weights, eta=group.targets[0].eta)
        for group in self._groups(masked, by_rho=False, by_mask=True):
            vector = group.scaled(power=1)
            parts.append(torch.linalg.vector_norm(vector, dtype=torch.float32 if vector.dtype in _HALF else None))
        return parts

    def move(self, targets: Sequence[Target], norm: float | Tensor, last: dict[str, Tensor] | None) -> None:
        """w + rho * m ⊙ T² g / norm; what was added is noted in ``last``, if given."""
        known: dict[object, tuple[float | Tensor, Tensor | None]] = {}
        for group in self._with_rooms(targets):
            rho, weight = group.targets[0].rho, group.targets[0].weight
            key = weight.device, _identity(rho)
            if key not in known:
                known[key] = scale_of(rho, norm, weight.device)
            self._add(group, perturbation(group.scaled(power=2), *known[key], weight.dtype))
            if last is not None:
                last.update(group.added())

    def move_by(self, targets: Sequence[Target], last: dict[str, Tensor]) -> None:
        """w + last."""
        for group in self._with_rooms(targets):
            self._add(group, group.given(last))

    def undo(self) -> None:
        while self._moved:
            self._moved[-1].restore()
            self._moved.pop()

    def forget(self) -> None:
        self._rooms, self._indexed = {}, {}

    def _add(self, group: Group, e: Tensor) -> None:
        room = self._rooms.get(group.names)
        if room is None or (room.shape, room.dtype, room.device) != (e.shape, e.dtype, e.device):
            room = self._rooms[group.names] = torch.empty_like(e)
        group.save(room)
        # Listed when all of it is saved and before any of it is moved, so that an interruption is undone too.
        self._moved.append(group)
        group.add(e)

    def _with_rooms(self, targets: Sequence[Target]) -> list[Group]:
        groups = list(self._groups(targets, by_rho=True, by_mask=True))
        names = {group.names for group in groups}
        self._rooms = {key: room for key, room in self._rooms.items() if key in names}
        return groups

    def _groups(self, targets: Sequence[Target], *, by_rho: bool, by_mask: bool) -> Iterator[Group]:
        """Targets that one vector can hold, in groups of at most `CHUNK` entries unless one tensor has more."""
        found: dict[object, tuple[Group, int]] = {}
        for target in targets:
            weight = target.weight
            if weight.numel() == 0:
                continue
            index = self._index(target) if by_mask else None
            kind = WholeGroup if index is None or index.kind == "bits" else EntryGroup
            rho = _identity(target.rho) if by_rho else None
            key = (weight.device, weight.dtype, target.direction.dtype, target.eta, rho, kind)
            number = weight.numel() if kind is WholeGroup or target.mask is None else target.mask.count
            group, size = found.pop(key, (kind([], []), 0))
            if group.targets and size + number > CHUNK:
                yield group
                group, size = kind([], []), 0
            group.targets.append(target)
            group.indices.append(index)
            found[key] = group, size + number
        for group, _ in found.values():
            yield group

    def _index(self, target: Target) -> KeptIndex | None:
        """The index of the target's mask, made now if the mask came without one that fits the weight's layout."""
        mask = target.mask
        if mask is None or mask.is_full:
            return None
        held = self._indexed.get(target.name)
        if held is None or held[0] is not mask:
            held = self._indexed[target.name] = (mask, mask.indexed(target.weight))
        return held[1].index
