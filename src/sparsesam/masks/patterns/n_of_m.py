"""N of every M consecutive weights, or filters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from sparsesam.masks.nm import Axis, as_matrix, choose_in_groups, governed, remainder
from sparsesam.masks.patterns.base import Choice, Pattern, Scores, check_choice
from sparsesam.masks.select import check_no_nan, copy_mask, count_true, random_mask, random_scores, top_mask
from sparsesam.masks.units import spread, unit_masks, unit_scores


@dataclass(frozen=True)
class NM(Pattern):
    """``n`` of every ``m`` consecutive entries of the im2col matrix (O, C * kh * kw).

    axis="output" groups entries along O, the dimension contracted in dX = dY · W; axis="input" along C * kh
    * kw. A last group with fewer than m entries is kept whole (remainder="dense") or refused ("error").
    Tensors with fewer than two dimensions are kept whole (vectors="dense") or never perturbed ("none").

    :meth:`drop_and_grow` drops N_drop = round(ratio * kept) of the entries that are kept in full groups, over all
    tensors together, and refills every group to n.
    """

    n: int
    m: int
    axis: Axis = "output"
    remainder: Literal["dense", "error"] = "dense"
    vectors: Literal["dense", "none"] = "dense"

    def __post_init__(self) -> None:
        _check_n_of_m(self.n, self.m)
        check_choice("axis", self.axis, get_args(Axis))
        check_choice("remainder", self.remainder, ("dense", "error"))
        check_choice("vectors", self.vectors, ("dense", "none"))

    @property
    def implied_sparsity(self) -> float:
        """1 - n / m."""
        return 1 - self.n / self.m

    def select(self, scores: Scores, sparsity: float | None = None) -> dict[str, Tensor]:
        """See :meth:`Pattern.select`."""
        _check_implied(self, sparsity)
        masks = {name: self._outside_groups(name, score) for name, score in scores.items()}
        for name, score in scores.items():
            self._fill(name, score, masks[name])
        return masks

    def _drop_and_grow(
        self, masks: Mapping[str, Tensor], keep: Choice, grow: Choice, sparsity: float | None, ratio: float
    ) -> dict[str, Tensor]:
        _check_implied(self, sparsity)
        grouped = {name: part for name, mask in masks.items() if (part := self._in_groups(mask)) is not None}
        kept = count_true(grouped)
        left = kept - round(ratio * kept)
        if isinstance(keep, torch.Generator):
            survivors = random_mask(grouped, left, generator=keep, among=grouped)
        else:
            scored = {name: governed(as_matrix(keep[name]), self.m, self.axis) for name in grouped}
            survivors = top_mask(scored, left, among=grouped)
        growth = random_scores(grouped, generator=grow) if isinstance(grow, torch.Generator) else grow
        # What lies outside full groups is fixed by the pattern, so it stays as it is.
        result = {name: copy_mask(mask) for name, mask in masks.items()}
        for name, first in survivors.items():
            self._fill(name, growth[name], result[name], first)
        return result

    def _in_groups(self, tensor: Tensor) -> Tensor | None:
        return governed(as_matrix(tensor), self.m, self.axis) if tensor.ndim >= 2 and tensor.numel() else None

    def _outside_groups(self, name: str, score: Tensor) -> Tensor:
        """The mask before its full groups are filled: remainders and vectors."""
        score = score.detach()
        mask = torch.empty(score.shape, dtype=torch.bool, device=score.device)
        if score.ndim < 2:
            return torch.gt(score, -math.inf, out=mask) if self.vectors == "dense" else mask.fill_(False)
        rest = remainder(as_matrix(mask), self.m, self.axis)
        if rest.numel():
            if self.remainder == "error":
                size = as_matrix(score).shape[0 if self.axis == "output" else 1]
                raise ValueError(
                    f"{name!r} has {size} entries along its {self.axis} axis, not a multiple of m={self.m}; "
                    "choose another m or axis, or remainder='dense' to keep the last group whole"
                )
            rest.copy_(remainder(as_matrix(score), self.m, self.axis) > -math.inf)
        return mask

    def _fill(self, name: str, score: Tensor, mask: Tensor, first: Tensor | None = None) -> None:
        check_no_nan(name, score)
        part = self._in_groups(mask)
        if part is not None:
            scores = governed(as_matrix(score.detach()), self.m, self.axis)
            choose_in_groups(scores, self.n, self.m, self.axis, out=part, first=first)


@dataclass(frozen=True)
class NMFilters(Pattern):
    """``n`` of every ``m`` consecutive filters, by mean score: whole rows, which dense kernels can skip.

    This is :class:`NM` along the output axis of the matrix of filter scores (O, 1), and its drop_and_grow drops
    round(ratio * kept) filters of those in full groups.
    """

    n: int
    m: int
    remainder: Literal["dense", "error"] = "dense"
    vectors: Literal["dense", "none"] = "dense"

    def __post_init__(self) -> None:
        self._inner()

    @property
    def implied_sparsity(self) -> float:
        """1 - n / m."""
        return 1 - self.n / self.m

    def select(self, scores: Scores, sparsity: float | None = None) -> dict[str, Tensor]:
        """See :meth:`Pattern.select`."""
        _check_implied(self, sparsity)
        return self._spread(self._inner().select(self._means(scores)), scores)

    def _drop_and_grow(
        self, masks: Mapping[str, Tensor], keep: Choice, grow: Choice, sparsity: float | None, ratio: float
    ) -> dict[str, Tensor]:
        _check_implied(self, sparsity)
        units = _as_rows(unit_masks(masks, "filter"), masks)
        inner = self._inner().drop_and_grow(units, self._choice(keep), self._choice(grow), ratio=ratio)
        return self._spread(inner, masks)

    def _inner(self) -> NM:
        return NM(self.n, self.m, remainder=self.remainder, vectors=self.vectors)

    def _choice(self, choice: Choice) -> Choice:
        return choice if isinstance(choice, torch.Generator) else self._means(choice)

    def _means(self, scores: Scores) -> dict[str, Tensor]:
        return _as_rows(unit_scores(scores, "filter"), scores)

    def _spread(self, rows: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return spread({name: row.reshape(-1) for name, row in rows.items()}, like, "filter")


def _check_implied(pattern: NM | NMFilters, sparsity: float | None) -> None:
    implied = pattern.implied_sparsity
    if sparsity is not None and not math.isclose(sparsity, implied, abs_tol=1e-9):
        raise ValueError(
            f"sparsity must be {implied:g} or left out with {pattern}, which implies it, got {sparsity}; "
            "change n and m to change the sparsity"
        )


def _check_n_of_m(n: int, m: int) -> None:
    if m < 1:
        raise ValueError(f"m must be at least 1, got {m}; it is the size of a group, 4 in 2:4")
    if not 0 <= n <= m:
        raise ValueError(f"n must be between 0 and m={m}, got {n}; n of every m consecutive entries are kept")


def _as_rows(units: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """(O,) -> (O, 1) for the tensors that are matrices, so that a filter is a row with one entry."""
    return {name: unit[:, None] if like[name].ndim >= 2 else unit for name, unit in units.items()}
