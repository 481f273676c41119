"""Splits the perturbed weights into pieces: entries that are read, moved and restored together.

On a CPU a piece is a slice of one tensor that fits in cache. On other devices it is many tensors of one dtype, rho and
eta, joined into one vector, so that the number of kernel launches does not grow with the number of tensors.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsesam.ascent.perturbation.kept_entries import positions_of
from sparsesam.masks.packed import PackedMask

#: Devices whose values the host can read without waiting, and whose tensors are moved one by one.
HOSTS = ("cpu",)
#: Entries of a slice on these devices, a multiple of 8.
SLICE = 1 << 16
#: Entries joined into one vector on other devices; besides the saved values, a few such vectors are allocated.
GROUP = 1 << 23


@dataclass(slots=True)
class Target:
    """A weight tensor and the direction g along which it is perturbed, usually its gradient.

    ``mask=None`` perturbs all of it, ``eta=None`` means T = 1. A negative ``rho`` goes against the direction. ``rho``
    may be a tensor on the weight's device, which is then not read by the host.
    """

    name: str
    weight: Tensor
    direction: Tensor
    mask: PackedMask | None
    rho: float | Tensor
    eta: float | None

    @property
    def is_dense(self) -> bool:
        return self.mask is None or self.mask.is_full

    @property
    def is_still(self) -> bool:
        is_empty = self.mask is not None and self.mask.is_empty
        return is_empty or (not isinstance(self.rho, Tensor) and self.rho == 0)

    @property
    def is_on_host(self) -> bool:
        return self.weight.device.type in HOSTS


#: ``{names of weights: (bits of their masks, kept positions)}``
Index = dict[tuple[str, ...], tuple[list[Tensor], Tensor]]


@dataclass(slots=True)
class Piece:
    """Weights that move together: all entries, the entries whose ``bits`` are set, or some ``rows`` of one weight.

    ``lengths``: how many entries of each weight move, if the weights are joined into one vector. A piece that is not
    joined is one tensor, and a vector if there are bits. Entries are in row-major order.
    """

    names: list[str]
    weights: list[Tensor]
    rho: float | Tensor
    eta: float | None
    bits: list[Tensor] | None = None
    rows: Tensor | None = None
    lengths: list[int] | None = None

    @property
    def is_view(self) -> bool:
        """Whether `read` returns the tensor itself, not a copy."""
        return self.lengths is None and self.bits is None and self.rows is None

    def positions(self, index: Index) -> Tensor | None:
        """Returns the entries or rows that move, None for all; ``index`` caches them on devices, if they are few."""
        if self.bits is None:
            return self.rows
        if self.lengths is None:
            return positions_of(self.bits[0])
        bits, found = index.get(tuple(self.names), ([], None))
        if found is None or not all(map(operator.is_, bits, self.bits)):
            count, size = sum(self.lengths), sum(one.numel() for one in self.weights)
            found = positions_of(torch.cat(self.bits), count)
            # Only if positions, saved entries and mask take no more memory than SAM, and positions fit in four bytes.
            if 4 * count + 4 * count + size / 8 <= 4 * size and size < 1 << 30:
                found = found.int()
                index[tuple(self.names)] = self.bits, found
        return found

    def read(self, tensors: list[Tensor], positions: Tensor | None) -> Tensor:
        """Returns the entries that move, from tensors shaped like the weights."""
        whole = self._as_one(tensors)
        return whole if positions is None else whole.index_select(0, positions)

    def write(self, values: Tensor, positions: Tensor | None) -> None:
        """Write values, laid out as `read` returns them, back to the weights."""
        if positions is not None:
            whole = self._as_one(self.weights)
            if positions.dtype == torch.int32:
                values = whole.index_put_((positions,), values)
            else:
                put = whole.scatter_ if whole.dim() == 1 else whole.index_copy_  # scatter_ is three times faster
                values = put(0, positions, values)
        first = self.weights[0]
        if len(self.weights) > 1:
            torch._foreach_copy_(self.weights, self._parted(values))
        elif positions is None or (self.lengths is not None and not first.is_contiguous()):
            first.copy_(values.view(first.shape))

    def by_name(self, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Split values that `read` returned into a vector for each weight."""
        vector = values.reshape(-1)
        return zip(self.names, [vector] if self.lengths is None else vector.split(self.lengths), strict=True)

    def _as_one(self, tensors: list[Tensor]) -> Tensor:
        if self.lengths is None:
            return tensors[0]
        vectors = [one.reshape(-1) for one in tensors]
        if self.bits is not None and len(vectors) == 1:  # may be as large as an embedding, so it is not copied
            return vectors[0]
        if self.bits is not None:  # bits of each weight start at a new byte
            filling = vectors[0].new_empty(8)
            vectors = [part for one in vectors for part in (one, filling[: -len(one) % 8])]
        return torch.cat(vectors)

    def _parted(self, vector: Tensor) -> list[Tensor]:
        """Returns views of a joined vector in the weights' shapes."""
        sizes = [one.numel() + (0 if self.bits is None else -one.numel() % 8) for one in self.weights]
        parts = zip(vector.split(sizes), self.weights, strict=True)
        return [part[: one.numel()].view(one.shape) for part, one in parts]


def pieces_of(targets: Sequence[Target], *, whole: bool = False) -> Iterator[tuple[Piece, list[Tensor]]]:
    """Yield the pieces of the kept entries, with their directions; of all entries with ``whole``."""
    groups: dict[tuple[Any, ...], list[Target]] = {}
    filled: Counter[tuple[Any, ...]] = Counter()
    number: Counter[tuple[Any, ...]] = Counter()
    for target in targets:
        weight, mask = target.weight, None if whole or target.is_dense else target.mask
        if mask is not None and mask.is_empty:
            continue
        if target.is_on_host:
            yield from _slices(target, mask)
            continue
        rho = id(target.rho) if isinstance(target.rho, Tensor) else target.rho
        key = weight.device, weight.dtype, target.direction.dtype, rho, target.eta, mask is not None
        if filled[key] and filled[key] + weight.numel() > GROUP:
            filled[key], number[key] = 0, number[key] + 1
        groups.setdefault((*key, number[key]), []).append(target)
        filled[key] += weight.numel()
    for (*_, is_masked, _), group in groups.items():
        yield _joined(group, is_masked)


def _slices(target: Target, mask: PackedMask | None) -> Iterator[tuple[Piece, list[Tensor]]]:
    """Yield slices of one tensor that fit in cache; the whole tensor if it is dense, rows, or not contiguous."""
    names, weight, direction, rho, eta = [target.name], target.weight.detach(), target.direction, target.rho, target.eta
    if mask is None or mask.bits is None or mask.rows is not None:
        yield Piece(names, [weight], rho, eta, rows=None if mask is None else mask.rows), [direction]
    elif not weight.is_contiguous():
        yield _joined([target], is_masked=True)
    else:
        weight, direction = weight.view(-1), direction.reshape(-1)
        for start in range(0, len(weight), SLICE):
            here, bits = slice(start, start + SLICE), mask.bits[start // 8 : (start + SLICE) // 8]
            yield Piece(names, [weight[here]], rho, eta, [bits]), [direction[here]]


def _joined(targets: list[Target], is_masked: bool) -> tuple[Piece, list[Tensor]]:
    weights = [target.weight.detach() for target in targets]
    bits, lengths = None, [weight.numel() for weight in weights]
    if is_masked:
        masks = [target.mask for target in targets if target.mask is not None]
        bits, lengths = [mask.bits for mask in masks if mask.bits is not None], [mask.count for mask in masks]
    names, first = [target.name for target in targets], targets[0]
    piece = Piece(names, weights, first.rho, first.eta, bits, lengths=lengths)
    return piece, [target.direction for target in targets]
