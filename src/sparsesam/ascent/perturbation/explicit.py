"""The explicit perturbation: masks the direction, moves the weights, restores them bit for bit.

    e = rho * m ⊙ T² g / ||T g||          norm="full", the paper's (with T = 1)
    e = rho * m ⊙ T² g / ||m ⊙ T g||      norm="masked"

T = 1 for SAM; T = |w| + eta for the adaptive form (ASAM). g is the direction of the targets.

    targets = [Target(name, weight, direction, mask, rho, eta), …]
    perturbation.apply(targets, perturbation.norm(targets, "full"))
    …                                      # weights at w + e
    perturbation.undo()                    # weights at w, bit for bit
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsesam.ascent.kinds import Norm
from sparsesam.ascent.perturbation.pieces import Index, Piece, Target, pieces_of

_HALF = (torch.float16, torch.bfloat16)

# ---- maths: tensors in, tensors out; compiles with fullgraph=True -------------------------------------------


def is_usable(norm: Tensor) -> Tensor:
    """0 < norm < inf"""
    return (norm > 0) & (norm < math.inf)


def scaled_direction(direction: Tensor, weight: Tensor, *, eta: float | None, times: int = 1) -> Tensor:
    """T g, or T² g with ``times=2``."""
    if eta is None:
        return direction
    scale = weight.abs().add_(eta)
    if times == 2:
        scale.square_()
    return scale.mul_(direction) if scale.dtype == direction.dtype else direction * scale


def norm_of(direction: Tensor, weight: Tensor, *, eta: float | None) -> Tensor:
    """||T g||, in at least float32."""
    scaled = scaled_direction(direction, weight, eta=eta)
    norm: Tensor = torch.linalg.vector_norm(scaled, dtype=torch.float32 if scaled.dtype in _HALF else None)
    return norm


def usable_or_inf(norm: Tensor) -> Tensor:
    """Returns the norm, or inf if it is zero or NaN."""
    return torch.where(norm > 0, norm, math.inf)


def perturbation_of(scaled: Tensor, rho: float | Tensor, norm: Tensor, dtype: torch.dtype) -> Tensor:
    """e = rho / norm * T² g, and zero for a norm of inf, whatever g is; in place, unless in half precision."""
    # A scale in half precision would be off by up to 0.4 %, or overflow.
    e = (scaled.float() if scaled.dtype in _HALF else scaled).mul_(rho / norm)
    return e.nan_to_num_(0.0).to(dtype)


# ---- weights that move ---------------------------------------------------------------------------------------


class Perturbation:
    """Adds e to the weights, and saves the old values of moved entries to restore them exactly.

    With ``remember`` the last e is kept as well, so that later steps can reuse it.
    """

    def __init__(self, *, remember: bool = False) -> None:
        self.last: dict[str, Tensor] = {}  # by name: e at the entries that moved, as a vector
        self._remember = remember
        self._moved: list[tuple[Piece, Tensor]] = []
        self._used: set[tuple[str, ...]] = set()  # keys of the index since the last move
        self.index: Index = {}  # caches positions on an accelerator; must be cleared when the masks change

    @torch.no_grad()
    def norm(self, targets: Sequence[Target], norm: Norm) -> float | Tensor:
        """||T g|| over all targets, or over their kept entries.

        A tensor if all targets are on accelerators, so that the host need not synchronize; otherwise a number.
        """
        parts = []
        for piece, directions in pieces_of(targets, whole=norm == "full"):
            positions = self._positions(piece)
            direction = piece.read(directions, positions)
            weight = direction if piece.eta is None else piece.read(piece.weights, positions)
            parts.append(norm_of(direction, weight, eta=piece.eta))
        if not parts:
            return 0.0
        home = parts[0].device
        total: Tensor = torch.linalg.vector_norm(torch.stack([part.to(home) for part in parts]))
        return float(total) if any(target.is_on_host for target in targets) else total

    @torch.no_grad()
    def apply(self, targets: Sequence[Target], norm: float | Tensor) -> None:
        """Move w to w + e. ``norm`` comes from `norm`; a number must be positive and finite. If a tensor is not,
        nothing moves.
        """
        self.last = {}
        moves = self._move(targets, norm)
        if self._remember:
            self.last = {name: torch.cat(parts) for name, parts in moves.items()}

    @torch.no_grad()
    def apply_last(self, targets: Sequence[Target]) -> None:
        """Move w to w + the last e; the targets' directions are not used."""
        taken: Counter[str] = Counter()
        for piece, _ in pieces_of([one for one in targets if one.name in self.last and not one.is_still]):
            positions = self._positions(piece)
            here = piece.read(piece.weights, positions)
            if piece.lengths is None:  # a slice of one tensor; the next piece is the next slice
                (name,) = piece.names
                e = self.last[name][taken[name] : taken[name] + here.numel()]
                taken[name] += here.numel()
            else:
                e = torch.cat([self.last[name] for name in piece.names])
            self._add(piece, positions, here, e.view_as(here))
        self._end_move()

    def _move(self, targets: Sequence[Target], norm: float | Tensor) -> dict[str, list[Tensor]]:
        moves: dict[str, list[Tensor]] = {}
        norm = usable_or_inf(norm) if isinstance(norm, Tensor) else norm
        for piece, directions in pieces_of([target for target in targets if not target.is_still]):
            positions = self._positions(piece)
            here = piece.read(piece.weights, positions)
            e = scaled_direction(piece.read(directions, positions), here, eta=piece.eta, times=2)
            if isinstance(norm, Tensor):
                e, factor = perturbation_of(e, piece.rho, norm.to(e.device), here.dtype), 1.0
            else:
                factor = float(piece.rho) / norm
            saved = self._add(piece, positions, here, e, factor, in_place=isinstance(norm, Tensor))
            if self._remember:
                for name, part in piece.by_name(piece.read(piece.weights, positions) - saved):
                    moves.setdefault(name, []).append(part)
        self._end_move()
        return moves

    def _positions(self, piece: Piece) -> Tensor | None:
        self._used.add(tuple(piece.names))
        return piece.positions(self.index)

    def _end_move(self) -> None:
        """Drop positions that were not used, such as those of other experts, and autocast's cached weights."""
        self.index = {names: kept for names, kept in self.index.items() if names in self._used}
        self._used = set()
        torch.clear_autocast_cache()  # inside autocast, a step would go on with the old weights

    def _add(
        self,
        piece: Piece,
        positions: Tensor | None,
        here: Tensor,
        e: Tensor,
        factor: float = 1.0,
        *,
        in_place: bool = False,
    ) -> Tensor:
        """w += factor * e in the entries that move; returns their old values, which are kept until `undo`.

        ``in_place``: e may be overwritten, and the factor is 1.
        """
        saved = here.clone() if piece.is_view else here
        # Listed before it is moved, so that an interrupted move is undone too.
        self._moved.append((piece, saved))
        if piece.is_view:
            here.add_(e, alpha=factor)
        else:
            piece.write(e.add_(here) if in_place else torch.add(here, e, alpha=factor), positions)
        return saved

    @torch.no_grad()
    def undo(self) -> None:
        """Restore w, bit for bit; an interruption (Ctrl-C) is raised only after that."""
        try:
            self._put_back()
        except BaseException:
            self._put_back()
            raise

    def _put_back(self) -> None:
        while self._moved:
            piece, saved = self._moved[-1]
            piece.write(saved, self._positions(piece))
            self._moved.pop()
        torch.clear_autocast_cache()
