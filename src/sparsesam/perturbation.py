"""The perturbation: masks a direction, moves the weights along it, restores them bit for bit.

    e = rho * m ⊙ T² g / ||T g||          norm="full", the paper's (with T = 1)
    e = rho * m ⊙ T² g / ||m ⊙ T g||      norm="masked"

T = 1 for SAM; T = |w| + eta for the adaptive form (ASAM). g is the direction of the targets.

    targets = [Target(name, weight, direction, mask, rho, eta), …]
    perturbation.move(targets, perturbation.norm(targets, "full"))
    …                                      # weights at w + e
    perturbation.undo()                    # weights at w, bit for bit

Weights are moved in pieces. On a CPU a piece is one tensor. On other devices it is many tensors of one dtype, rho and
eta, joined into one vector, so that the number of kernel launches does not grow with the number of tensors, and the
host reads no value.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards
from sparsesam.masks.kept_entries import kept_entries, positions_of, put_entries
from sparsesam.masks.packed import PackedMask

Norm = Literal["full", "masked"]
Radius = Literal["global", "layer", "element"]

#: Devices whose values the host can read without waiting, and whose tensors are moved one by one.
HOSTS = ("cpu",)
#: Entries joined into one vector on other devices; besides the saved values, a few such vectors are allocated.
GROUP = 1 << 23
_HALF = (torch.float16, torch.bfloat16)
#: Norms whose squares float32 holds, to its precision; and the smallest that is not taken for zero.
_SAFE, _LEAST = (1e-15, 1e15), 1e-30


@dataclass(slots=True)
class Target:
    """A weight tensor and the direction g along which it is perturbed, usually its gradient.

    ``mask=None`` perturbs all of it; ``eta=None`` means T = 1, or T = ||w|| with ``layerwise``. A negative ``rho`` goes
    against the direction. ``rho`` may be a tensor on the weight's device, which is then not read by the host.
    """

    name: str
    weight: Tensor
    direction: Tensor
    mask: PackedMask | None
    rho: float | Tensor
    eta: float | None
    layerwise: bool = False

    @property
    def is_dense(self) -> bool:
        return self.mask is None or self.mask.is_full

    @property
    def is_unmoved(self) -> bool:
        """Whether the mask keeps nothing or rho is 0."""
        is_empty = self.mask is not None and self.mask.is_empty
        return is_empty or (not isinstance(self.rho, Tensor) and self.rho == 0)

    @property
    def is_on_host(self) -> bool:
        return self.weight.device.type in HOSTS


def is_on_accelerator(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


# ---- maths: tensors in, tensors out; compiles with fullgraph=True -------------------------------------------


def is_usable(norm: Tensor) -> Tensor:
    """0 < norm < inf"""
    return (norm > 0) & (norm < math.inf)


def usable_or_inf(norm: Tensor) -> Tensor:
    """Returns the norm, or inf if it is zero or NaN."""
    return torch.where(norm > 0, norm, math.inf)


def scaled_direction(direction: Tensor, weight: Tensor, *, eta: float | None, times: int = 1) -> Tensor:
    """T g, or T² g with ``times=2``; that in at least float32."""
    if eta is None:
        return direction
    scale = (weight.float() if weight.dtype in _HALF else weight).abs().add_(eta)  # T² g may be below half precision
    if times == 2:
        scale.square_()
    return scale.mul_(direction) if scale.dtype == direction.dtype else direction * scale


def norm_of(direction: Tensor, weight: Tensor, *, eta: float | None, dtype: torch.dtype | None = None) -> Tensor:
    """||T g||, in ``dtype``; default: in at least float32."""
    scaled = scaled_direction(direction, weight, eta=eta)
    dtype = dtype or (torch.float32 if scaled.dtype in _HALF else None)
    norm: Tensor = torch.linalg.vector_norm(scaled, dtype=dtype)
    return norm


def perturbation_of(scaled: Tensor, rho: float | Tensor, norm: Tensor, dtype: torch.dtype) -> Tensor:
    """e = rho / norm * T² g, and zero for a norm of inf, whatever g is; in place, unless in half precision."""
    # A scale in half precision would be off by up to 0.4 %, or overflow.
    e = (scaled.float() if scaled.dtype in _HALF else scaled).mul_(rho / norm)
    return e.nan_to_num_(0.0).to(dtype)


# ---- weights that move ---------------------------------------------------------------------------------------


class Perturbation:
    """Adds e to the weights, and saves the old values of moved entries to restore them exactly."""

    def __init__(self) -> None:
        self.index: Index = {}  # caches positions on an accelerator; must be cleared when the masks change
        self._undo: list[Callable[[], None]] = []  # what restores the weights, last move first
        self._used: set[tuple[str, ...]] = set()  # keys of the index since the last move

    @torch.no_grad()
    def norm(self, targets: Sequence[Target], norm: Norm, shards: Shards | None = None) -> float | Tensor:
        """||T g|| over all targets, or over their kept entries; over all ranks if they are sharded.

        A tensor if all targets are on accelerators, so that the host need not synchronize; otherwise a number, in which
        squares neither overflow nor underflow: it is zero below 1e-30, where rho / norm could overflow.
        """
        if shards is not None:
            counted = set(shards.counted(target.name for target in targets))
            return shards.norm(self.norm([target for target in targets if target.name in counted], norm))
        total = self._norm(targets, norm)
        if not any(target.is_on_host for target in targets):
            return total
        number = float(total)
        if not _SAFE[0] < number < _SAFE[1] and not math.isnan(number):
            number = float(self._norm(targets, norm, torch.float64))
        return 0.0 if number < _LEAST else number

    def _norm(self, targets: Sequence[Target], norm: Norm, dtype: torch.dtype | None = None) -> float | Tensor:
        parts = []
        for piece in pieces_of(targets, whole=norm == "full"):
            positions = self._positions(piece)
            direction = piece.read(piece.directions, positions)
            weight = direction if piece.eta is None else piece.read(piece.weights, positions)
            parts.append(norm_of(direction, weight, eta=piece.eta, dtype=dtype))
        if not parts:
            return 0.0
        first = parts[0].device
        total: Tensor = torch.linalg.vector_norm(torch.stack([part.to(first) for part in parts]))
        return total

    def scale_layers(self, targets: Sequence[Target], shards: Shards | None) -> None:
        """Where T is the norm of the whole weight tensor: T² g = T (T g)."""
        for target in targets:
            if target.layerwise:
                size = self.norm([replace(target, direction=target.weight, mask=None)], "full", shards)
                target.direction, target.rho = target.direction * size, target.rho * size

    def set_radius(self, targets: Sequence[Target], radius: Radius, norm: Norm, shards: Shards | None) -> None:
        """Change the targets so that a move with norm 1 has this radius."""
        for target in targets:
            if radius == "element":
                target.direction = target.direction.sign()
                continue
            own = self.norm([target], norm, shards)
            if isinstance(own, Tensor):
                target.rho = target.rho / usable_or_inf(own)
            else:
                target.rho = target.rho / own if own > 0 else 0.0

    @torch.no_grad()
    def move(self, targets: Sequence[Target], norm: float | Tensor, *, times: int = 2) -> None:
        """Move w to w + e. ``norm`` comes from `norm`; a number must be positive and finite. If a tensor is not,
        nothing moves. With ``times=1``, e = rho * m ⊙ T g / norm.
        """
        norm = usable_or_inf(norm) if isinstance(norm, Tensor) else norm
        for piece in pieces_of([target for target in targets if not target.is_unmoved]):
            positions = self._positions(piece)
            weight = piece.read(piece.weights, positions)
            e = scaled_direction(piece.read(piece.directions, positions), weight, eta=piece.eta, times=times)
            piece.directions = []  # what undoes the move must not hold the gradients
            saved = weight.clone() if piece.is_view else weight
            # Listed before it is moved, so that an interrupted move is undone too.
            self._undo.append(partial(self._write, piece, saved))
            if isinstance(norm, Tensor):
                e = perturbation_of(e, piece.rho, norm.to(e.device), weight.dtype)
                moved = weight.add_(e) if piece.is_view else e.add_(weight)
            else:
                factor = float(piece.rho) / norm
                e = e.float() if e.dtype in _HALF else e  # float16 ends at 65504, which the factor may exceed
                moved = weight.add_(e, alpha=factor) if piece.is_view else torch.add(weight, e, alpha=factor)
                moved = moved.to(weight.dtype)
            if not piece.is_view:
                piece.write(moved, positions)
        # Drop positions that were not used, such as those of other experts.
        self.index = {names: kept for names, kept in self.index.items() if names in self._used}
        self._used = set()
        torch.clear_autocast_cache()  # inside autocast, a step would go on with the old weights

    @torch.no_grad()
    def move_to(self, targets: Sequence[Target], values: Sequence[Tensor], *, saved: Sequence[Tensor]) -> None:
        """Move the kept entries to these values; ``saved`` holds what they are now. Both are like `entries_of`."""
        self._undo.append(partial(put_entries_of, targets, saved))
        put_entries_of(targets, values)
        torch.clear_autocast_cache()

    @torch.no_grad()
    def undo(self) -> None:
        """Restore w, bit for bit; an interruption (Ctrl-C) is raised only after that."""
        try:
            self._put_back()
        except BaseException:
            self._put_back()
            raise

    def _put_back(self) -> None:
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
        torch.clear_autocast_cache()

    def _write(self, piece: Piece, values: Tensor) -> None:
        piece.write(values, self._positions(piece))

    def _positions(self, piece: Piece) -> Tensor | None:
        self._used.add(tuple(piece.names))
        return piece.positions(self.index)


def entries_of(targets: Sequence[Target]) -> list[Tensor]:
    """Returns their kept entries: the weights themselves, whole rows, or vectors."""
    return [kept_entries(target.weight, target.mask) for target in targets]


def put_entries_of(targets: Sequence[Target], values: Sequence[Tensor]) -> None:
    """Write values, laid out as `entries_of` returns them, to the weights."""
    dense = [(target.weight, value) for target, value in zip(targets, values, strict=True) if target.is_dense]
    if dense:
        torch._foreach_copy_([weight for weight, _ in dense], [value for _, value in dense])
    for target, value in zip(targets, values, strict=True):
        if not target.is_dense:
            put_entries(target.weight, target.mask, value)


# ---- pieces --------------------------------------------------------------------------------------------------

#: ``{names of weights: (bits of their masks, kept positions)}``
Index = dict[tuple[str, ...], tuple[list[Tensor], Tensor]]


@dataclass(slots=True)
class Piece:
    """Weights that move together: one tensor, some ``rows`` of it, or tensors joined into one vector.

    Of a vector, the entries whose ``bits`` are set move, ``count`` in all. Entries are in row-major order.
    """

    names: list[str]
    weights: list[Tensor]
    directions: list[Tensor]
    rho: float | Tensor
    eta: float | None
    rows: Tensor | None = None
    bits: list[Tensor] | None = None
    count: int = 0
    is_joined: bool = True

    @property
    def is_view(self) -> bool:
        """Whether `read` returns the tensor itself, not a copy."""
        return not self.is_joined and self.rows is None

    def positions(self, index: Index) -> Tensor | None:
        """Returns the entries or rows that move, None for all; ``index`` caches them on devices, if they are few."""
        if self.bits is None:
            return self.rows
        bits, found = index.get(tuple(self.names), ([], None))
        if found is None or not all(map(operator.is_, bits, self.bits)):
            size = sum(weight.numel() for weight in self.weights)
            found = positions_of(torch.cat(self.bits), self.count)
            # Only if positions, saved entries and mask take no more memory than SAM, and positions fit in four bytes.
            is_small = 4 * self.count + 4 * self.count + size / 8 <= 4 * size and size < 1 << 30
            if is_small and self.weights[0].device.type not in HOSTS:
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
        elif positions is None or (self.is_joined and not first.is_contiguous()):
            first.copy_(values.view(first.shape))

    def _as_one(self, tensors: list[Tensor]) -> Tensor:
        if not self.is_joined:
            return tensors[0]
        vectors = [tensor.reshape(-1) for tensor in tensors]
        if self.bits is not None and len(vectors) == 1:  # may be as large as an embedding, so it is not copied
            return vectors[0]
        if self.bits is not None:  # bits of each weight start at a new byte
            filling = vectors[0].new_empty(8)
            vectors = [part for vector in vectors for part in (vector, filling[: -len(vector) % 8])]
        return torch.cat(vectors)

    def _parted(self, vector: Tensor) -> list[Tensor]:
        """Returns views of a joined vector in the weights' shapes."""
        sizes = [weight.numel() + (0 if self.bits is None else -weight.numel() % 8) for weight in self.weights]
        parts = zip(vector.split(sizes), self.weights, strict=True)
        return [part[: weight.numel()].view(weight.shape) for part, weight in parts]


def pieces_of(targets: Sequence[Target], *, whole: bool = False) -> Iterator[Piece]:
    """Yield the pieces of the kept entries; of all entries with ``whole``."""
    groups: dict[tuple[Any, ...], list[Target]] = {}
    filled: Counter[tuple[Any, ...]] = Counter()
    number: Counter[tuple[Any, ...]] = Counter()
    for target in targets:
        weight, mask = target.weight, None if whole or target.is_dense else target.mask
        if mask is not None and mask.is_empty:
            continue
        if target.is_on_host:
            rows = None if mask is None else mask.rows
            yield _piece([target], rows=rows, is_masked=mask is not None and rows is None, joins=False)
            continue
        rho = id(target.rho) if isinstance(target.rho, Tensor) else target.rho
        key = weight.device, weight.dtype, target.direction.dtype, rho, target.eta, mask is not None
        if filled[key] and filled[key] + weight.numel() > GROUP:
            filled[key], number[key] = 0, number[key] + 1
        groups.setdefault((*key, number[key]), []).append(target)
        filled[key] += weight.numel()
    for (*_, is_masked, _), group in groups.items():
        yield _piece(group, is_masked=is_masked)


def _piece(targets: list[Target], *, rows: Tensor | None = None, is_masked: bool, joins: bool = True) -> Piece:
    masks = [target.mask for target in targets if target.mask is not None] if is_masked else []
    return Piece(
        [target.name for target in targets],
        [target.weight.detach() for target in targets],
        [target.direction for target in targets],
        targets[0].rho,
        targets[0].eta,
        rows,
        [mask.bits for mask in masks if mask.bits is not None] if is_masked else None,
        sum(mask.count for mask in masks),
        is_joined=joins or is_masked,
    )
