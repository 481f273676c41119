"""The perturbation on an accelerator: few launches whatever the number of tensors, and nothing read by the host.

Tensors of one device, dtype, rho and eta move together: their directions become one vector, on which the maths runs.
Of masked tensors only the kept entries of that vector are saved and moved. The norm stays on the device, and so does
the rule for a norm that is zero or not finite, with which nothing moves:

    e = rho / norm * T² g  where 0 < norm < inf,  else 0
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sparsesam.ascent.perturbation.kept_entries import put_entries
from sparsesam.ascent.perturbation.kept_positions import KeptPositions, flat, joined
from sparsesam.ascent.perturbation.targets import Target
from sparsesam.ascent.plan import Norm

#: Entries that are moved at a time: room for one such vector is all that is needed beside what is saved.
CHUNK = 1 << 23

_HALF = (torch.float16, torch.bfloat16)


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


def parted(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of the vector that look like those tensors: the inverse of `joined`."""
    pieces = vector.split([one.numel() for one in like])
    return [piece.as_strided(one.shape, one.stride()) for piece, one in zip(pieces, like, strict=True)]


def scaled_directions(directions: Tensor, weights: Tensor | None, *, eta: float | None, power: int) -> Tensor:
    """T^power g of vectors, with T = |w| + eta; in place. ``weights`` may be left out where eta is None."""
    if eta is None or weights is None:
        return directions
    return directions.mul_((weights.abs() + eta).pow_(power))


def usable_or_zero(scaled: Tensor, scale: float | Tensor, unusable: Tensor | None, dtype: torch.dtype) -> Tensor:
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


# ---- groups of targets --------------------------------------------------------------------------------------


class Group:
    """Targets of one device, dtype, rho and eta, which move together; ``saved`` holds w as a vector while they do.

    Of masked targets only the ``kept`` entries are saved and moved; None: all of them.
    """

    def __init__(self, targets: list[Target], kept: KeptPositions | None) -> None:
        self.targets, self._kept = targets, kept
        self.saved: Tensor | None = None
        self._positions: Tensor | None = None  # while a move is prepared: they may take more memory than what is saved

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(target.name for target in self.targets)

    @property
    def weights(self) -> list[Tensor]:
        return [target.weight.detach() for target in self.targets]

    def scaled(self, *, power: int) -> Tensor:
        """T^power g of the entries that move, as one vector."""
        eta = self.targets[0].eta
        directions = self._gather([target.direction for target in self.targets])
        weights = None if eta is None else self._gather(self.weights)
        return scaled_directions(directions, weights, eta=eta, power=power)

    def save(self, room: Tensor) -> None:
        """Copy the entries of w that move into ``room``, and keep it."""
        self.saved = self._gather(self.weights, room)

    def add(self, e: Tensor) -> None:
        """w += e, in the entries that move; ``e`` is used up."""
        assert self.saved is not None
        self._write(e.add_(self.saved))

    def restore(self) -> None:
        """Bring back what was saved."""
        assert self.saved is not None
        self._write(self.saved)

    def added(self) -> dict[str, Tensor]:
        """w + e - w by name: like the weight, or its kept entries in row-major order, or its kept rows."""
        assert self.saved is not None
        moved, self._positions = self._gather(self.weights).sub_(self.saved), None
        if self._kept is not None and all(weight.is_contiguous() for weight in self.weights):
            pieces = zip(self.targets, moved.split(self._kept.lengths), strict=True)
            return {target.name: _by_rows(target, piece) for target, piece in pieces}
        if self._kept is not None:
            moved = joined(self.weights, self.weights).zero_().index_put_((self._kept.find(),), moved)
        return dict(zip(self.names, parted(moved, self.weights), strict=True))

    def given(self, last: dict[str, Tensor]) -> Tensor:
        """What `added` gave, here or by the host's implementation, as the vector that `add` takes."""
        entries = [last[name] for name in self.names]
        if all(w.is_contiguous() and e.shape != w.shape for w, e in zip(self.weights, entries, strict=True)):
            return torch.cat([one.reshape(-1) for one in entries])
        return self._gather([_like_weight(target, e) for target, e in zip(self.targets, entries, strict=True)])

    def _gather(self, tensors: Sequence[Tensor], room: Tensor | None = None) -> Tensor:
        """The entries that move, of tensors like the weights, as one new vector."""
        if self._kept is None:
            return torch.cat([flat(one, w.stride()) for one, w in zip(tensors, self.weights, strict=True)], out=room)
        if self._positions is None:
            self._positions = self._kept.find()
        return torch.index_select(self._vector(tensors), 0, self._positions, out=room)

    def _vector(self, tensors: Sequence[Tensor]) -> Tensor:
        """All entries; a view of them where there is only one tensor."""
        if len(tensors) == 1:
            return flat(tensors[0], self.weights[0].stride())
        return joined(tensors, self.weights)

    def _write(self, values: Tensor) -> None:
        if self._kept is not None:
            positions = self._kept.find() if self._positions is None else self._positions
            values, self._positions = self._vector(self.weights).index_put_((positions,), values), None
        if self._kept is None or len(self.targets) > 1:
            torch._foreach_copy_(self.weights, parted(values, self.weights))


def _by_rows(target: Target, entries: Tensor) -> Tensor:
    assert target.mask is not None
    return entries if target.mask.rows is None else entries.view(-1, *target.weight.shape[1:])


def _identity(rho: float | Tensor) -> float | tuple[str, int]:
    return ("tensor", id(rho)) if isinstance(rho, Tensor) else rho


def _like_weight(target: Target, e: Tensor) -> Tensor:
    """An e of kept entries or rows, laid out like the weight."""
    if e.shape == target.weight.shape:
        return e
    return put_entries(torch.zeros(target.weight.shape, dtype=e.dtype, device=e.device), target.mask, e)


class DeviceMover:
    """See `sparsesam.ascent.perturbation.explicit.Perturbation`, of which this is one half."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[str, ...], Tensor] = {}
        self._moved: list[Group] = []
        self._kept: dict[tuple[str, ...], KeptPositions] = {}

    @property
    def active(self) -> bool:
        return bool(self._moved)

    def norms(self, targets: Sequence[Target], norm: Norm) -> list[Tensor]:
        """||T g|| of each target or group of them, over all entries or the kept ones; at least float32."""
        whole = [target for target in targets if norm == "full" or target.is_dense]
        masked = [target for target in targets if norm == "masked" and not (target.is_dense or target.is_empty)]
        parts = []
        for group in self._groups(whole, whole=True):
            directions = [target.direction for target in group.targets]
            parts += group_norms(directions, group.weights, eta=group.targets[0].eta)
        for group in self._groups(masked):
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
            self._add(group, usable_or_zero(group.scaled(power=2), *known[key], weight.dtype))
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
        self._rooms, self._kept = {}, {}

    def _add(self, group: Group, e: Tensor) -> None:
        room = self._rooms.get(group.names)
        if room is None or (room.shape, room.dtype, room.device) != (e.shape, e.dtype, e.device):
            room = self._rooms[group.names] = torch.empty_like(e)
        group.save(room)
        # Listed when all of it is saved and before any of it is moved, so that an interruption is undone too.
        self._moved.append(group)
        group.add(e)

    def _with_rooms(self, targets: Sequence[Target]) -> list[Group]:
        groups = list(self._groups(targets))
        names = {group.names for group in groups}
        self._rooms = {key: room for key, room in self._rooms.items() if key in names}
        self._kept = {key: kept for key, kept in self._kept.items() if key in names}
        return groups

    def _groups(self, targets: Sequence[Target], *, whole: bool = False) -> Iterator[Group]:
        """Targets that one vector can hold, at most `CHUNK` entries unless one tensor has more."""
        found: dict[object, tuple[list[Target], int]] = {}
        for target in targets:
            weight, is_whole = target.weight, whole or target.is_dense
            if weight.numel() == 0:
                continue
            key = (weight.device, weight.dtype, target.direction.dtype, target.eta, _identity(target.rho), is_whole)
            together, size = found.pop(key, ([], 0))
            if together and size + weight.numel() > CHUNK:
                yield self._group(together, whole=is_whole)
                together, size = [], 0
            together.append(target)
            found[key] = together, size + weight.numel()
        for together, _ in found.values():
            yield self._group(together, whole=whole or together[0].is_dense)

    def _group(self, targets: list[Target], *, whole: bool) -> Group:
        if whole:
            return Group(targets, None)
        masks = [target.mask for target in targets if target.mask is not None]
        names, weights = tuple(target.name for target in targets), [target.weight for target in targets]
        kept = self._kept.get(names)
        if kept is None or not kept.fits(masks, weights):
            kept = self._kept[names] = KeptPositions(masks, weights)
        return Group(targets, kept)
