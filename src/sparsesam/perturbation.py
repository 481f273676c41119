"""The perturbation: masks a direction, moves the weights along it, restores them bit for bit.

    e = rho * m ⊙ T² g / ||T g||          norm="full", the paper's (with T = 1)
    e = rho * m ⊙ T² g / ||m ⊙ T g||      norm="masked"

T = 1 for SAM; T = |w| + eta for the adaptive form (ASAM). g is the direction of the targets.

    targets = [Target(name, weight, direction, mask, rho, eta), …]
    perturbation.ascend(targets, "full")
    …                                      # weights at w + e
    perturbation.undo()                    # weights at w, bit for bit

Weights are moved in pieces. On a CPU a piece is one tensor. On other devices it is many tensors of one dtype, rho and
eta, joined into one vector, so that the number of kernel launches does not grow with the number of tensors, and the
host reads no value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards
from sparsesam.masks.packed import PackedMask, positions_of

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
    eta: float | None = None
    layerwise: bool = False

    @property
    def is_unmoved(self) -> bool:
        """Whether the mask keeps nothing or rho is 0."""
        return is_unmoved(self.mask, self.rho)

    @property
    def is_on_host(self) -> bool:
        return self.weight.device.type in HOSTS


def is_unmoved(mask: PackedMask | None, rho: float | Tensor) -> bool:
    """Whether nothing is kept, or rho is known to be 0."""
    return (mask is not None and mask.is_empty) or (not isinstance(rho, Tensor) and rho == 0)


def is_on_accelerator(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def is_usable(norm: Any) -> Any:
    """0 < norm < inf, for a number or a tensor."""
    return (norm > 0) & (norm < math.inf)


def scaled_direction(direction: Tensor, weight: Tensor, *, eta: float | None, times: int = 1) -> Tensor:
    """T g, or T² g with ``times=2``; that in at least float32."""
    if eta is None:
        return direction
    scale = (weight.float() if weight.dtype in _HALF else weight).abs().add_(eta)  # T² g may be below half precision
    if times == 2:
        scale.square_()
    return scale.mul_(direction) if scale.dtype == direction.dtype else direction * scale


class Perturbation:
    """Adds e to the weights, and saves the old values of moved entries to restore them exactly."""

    def __init__(self) -> None:
        self._index: Index = {}
        self._undo: list[Callable[[], None]] = []  # what restores the weights, last move first

    @torch.no_grad()
    def ascend(
        self, targets: Sequence[Target], norm: Norm, radius: Radius = "global", shards: Shards | None = None
    ) -> float | Tensor:
        """Move w to w + e and return ||T g||, see `norm`. Nothing moves unless it `is_usable`. Changes the targets."""
        for target in targets:
            if target.layerwise:  # T is the norm of the whole weight tensor: T² g = T (T g)
                size = self.norm([replace(target, direction=target.weight, mask=None)], "full", shards)
                target.direction, target.rho = target.direction * size, target.rho * size
        total = self.norm(targets, norm, shards)
        if not isinstance(total, Tensor) and not is_usable(total):
            return total
        for target in targets if radius == "layer" else ():
            own = self.norm([target], norm, shards)
            if isinstance(own, Tensor):
                target.rho = target.rho / torch.where(own > 0, own, math.inf)
            else:
                target.rho = target.rho / own if own > 0 else 0.0
        for target in targets if radius == "element" else ():
            target.direction = target.direction.sign()
        # The second norm is 1, or NaN where that of a device is not usable.
        self.move(targets, total if radius == "global" else total / total, times=1 if radius == "element" else 2)
        return total

    @torch.no_grad()
    def norm(self, targets: Sequence[Target], norm: Norm, shards: Shards | None = None) -> float | Tensor:
        """||T g|| over all targets, or over their kept entries; over all ranks if they are sharded.

        A tensor if all targets are on accelerators, so that the host need not synchronize; otherwise a number, in which
        squares neither overflow nor underflow: it is zero below 1e-30, where rho / norm could overflow.
        """
        if shards is not None:
            counted = set(shards.counted(target.name for target in targets))
            own = self.norm([target for target in targets if target.name in counted], norm)
            if not targets or any(target.is_on_host for target in targets):
                return shards.norm(float(own))
            # A rank without kept entries has the number 0, and must send what the others send.
            is_double = any(target.weight.dtype == torch.float64 for target in targets)
            dtype = torch.float64 if is_double else torch.float32
            return shards.norm(torch.as_tensor(own, dtype=dtype, device=targets[0].weight.device))
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
            if piece.eta is not None:
                direction = scaled_direction(direction, piece.read(piece.weights, positions), eta=piece.eta)
            at_least = torch.float32 if direction.dtype in _HALF else None
            parts.append(torch.linalg.vector_norm(direction, dtype=dtype or at_least))
        if not parts:
            return 0.0
        total: Tensor = torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts]))
        return total

    @torch.no_grad()
    def move(self, targets: Sequence[Target], norm: float | Tensor, *, times: int = 2) -> None:
        """Move w to w + e. A number must be positive and finite; if a tensor is not, nothing moves.

        With ``times=1``, e = rho * m ⊙ T g / norm.
        """
        norm = torch.where(norm > 0, norm, math.inf) if isinstance(norm, Tensor) else norm
        used = set()
        for piece in pieces_of([target for target in targets if not target.is_unmoved]):
            positions = self._positions(piece)
            used.add(piece.masks)
            weight = piece.read(piece.weights, positions)
            e = scaled_direction(piece.read(piece.directions, positions), weight, eta=piece.eta, times=times)
            e = e.float() if e.dtype in _HALF else e  # float16 ends at 65504, which rho / norm may exceed
            piece.directions = []  # what undoes the move must not hold the gradients
            saved = weight.clone() if piece.is_view else weight
            # Listed before it is moved, so that an interrupted move is undone too.
            self._undo.append(partial(self._write, piece, saved))
            factor = 1.0
            if isinstance(norm, Tensor):
                e = (e * (piece.rho / norm.to(e.device))).nan_to_num_(0.0)
            else:
                factor = float(piece.rho) / norm
            if piece.is_view:
                weight.add_(e, alpha=factor)
            else:
                out = e if e.dtype == weight.dtype else None  # no view of the direction: entries or joined tensors
                piece.write(torch.add(weight, e, alpha=factor, out=out).to(weight.dtype), positions)
        # Drop positions that were not used, such as those of other experts.
        self._index = {masks: found for masks, found in self._index.items() if masks in used}
        torch.clear_autocast_cache()  # inside autocast, a step would go on with the old weights

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
        """Returns the entries or rows that move, None for all; on devices, they are cached if they are few."""
        if not piece.masks or piece.rows is not None:
            return piece.rows
        found = self._index.get(piece.masks)
        if found is None:
            count = sum(mask.count for mask in piece.masks)
            found = positions_of(torch.cat([mask.bits for mask in piece.masks if mask.bits is not None]), count)
            # Only if positions, saved entries and mask take no more memory than SAM, and positions fit in four bytes.
            is_small = 4 * count + 4 * count + piece.size / 8 <= 4 * piece.size and piece.size < 1 << 30
            if is_small and piece.weights[0].device.type not in HOSTS:
                found = self._index[piece.masks] = found.int()
        return found


# ---- pieces --------------------------------------------------------------------------------------------------

#: Positions of the entries that masks keep.
Index = dict[tuple[PackedMask, ...], Tensor]


class Piece:
    """Weights that move together: one tensor, or tensors joined into one vector.

    Of all with ``masks``, whole rows of one tensor move, or entries in row-major order.
    """

    def __init__(self, targets: Sequence[Target], *, is_masked: bool) -> None:
        self.weights = [target.weight.detach() for target in targets]
        self.directions = [target.direction for target in targets]
        self.masks = tuple(target.mask for target in targets if target.mask is not None) if is_masked else ()
        self.rho, self.eta = targets[0].rho, targets[0].eta
        self.size = sum(weight.numel() for weight in self.weights)
        self.rows = self.masks[0].rows if len(self.masks) == 1 else None

    @property
    def is_view(self) -> bool:
        """Whether `read` returns the tensor itself, not a copy."""
        return len(self.weights) == 1 and not self.masks

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
        elif positions is None or (self.rows is None and not first.is_contiguous()):  # otherwise, it was written to
            first.copy_(values.view(first.shape))

    def _as_one(self, tensors: list[Tensor]) -> Tensor:
        if len(tensors) == 1:  # may be as large as an embedding, so it is not copied
            return tensors[0] if not self.masks or self.rows is not None else tensors[0].reshape(-1)
        vectors = [tensor.reshape(-1) for tensor in tensors]
        if self.masks:  # bits of each weight start at a new byte
            filling = vectors[0].new_empty(8)
            vectors = [part for vector in vectors for part in (vector, filling[: -len(vector) % 8])]
        return torch.cat(vectors)

    def _parted(self, vector: Tensor) -> list[Tensor]:
        """Returns views of a joined vector in the weights' shapes."""
        sizes = [weight.numel() + (-weight.numel() % 8 if self.masks else 0) for weight in self.weights]
        parts = zip(vector.split(sizes), self.weights, strict=True)
        return [part[: weight.numel()].view(weight.shape) for part, weight in parts]


def pieces_of(targets: Sequence[Target], *, whole: bool = False) -> Iterator[Piece]:
    """Yield the pieces of the kept entries; of all entries with ``whole``."""
    joined: dict[tuple[Any, ...], list[Target]] = {}
    filled: dict[tuple[Any, ...], int] = {}
    for target in targets:
        weight, mask = target.weight, None if whole else target.mask
        if mask is not None and mask.is_empty:
            continue
        is_masked = mask is not None and not mask.is_full
        if target.is_on_host:
            yield Piece([target], is_masked=is_masked)
            continue
        rho = id(target.rho) if isinstance(target.rho, Tensor) else target.rho
        key = weight.device, weight.dtype, target.direction.dtype, rho, target.eta, is_masked
        if key in joined and filled[key] + weight.numel() > GROUP:
            yield Piece(joined.pop(key), is_masked=is_masked)
        filled[key] = weight.numel() + (filled[key] if key in joined else 0)
        joined.setdefault(key, []).append(target)
    for (*_, is_masked), group in joined.items():
        yield Piece(group, is_masked=is_masked)
