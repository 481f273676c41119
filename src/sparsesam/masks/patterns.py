"""Which sets of weights may be perturbed together.

A pattern turns scores into a mask (SSAM-F) and exchanges a part of a mask for another (SSAM-D). It sees
names, shapes and scores, never data or modules.
"""

from __future__ import annotations

import difflib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from sparsesam.masks.nm import Axis, as_matrix, choose_in_groups, governed, remainder
from sparsesam.masks.select import (
    check_alike,
    check_no_nan,
    copy_mask,
    count_true,
    random_mask,
    random_scores,
    top_mask,
)
from sparsesam.masks.units import Unit, fill_greedily, spread, unit_count, unit_masks, unit_scores

Scores = Mapping[str, Tensor]
# The largest of given scores, or any, drawn uniformly with a generator over the pattern's units.
Choice = Mapping[str, Tensor] | torch.Generator


class Pattern(ABC):
    """A family of allowed masks."""

    @property
    def implied_sparsity(self) -> float | None:
        """The sparsity that the pattern fixes by itself, or None if it has to be given."""
        return None

    @abstractmethod
    def select(self, scores: Scores, sparsity: float | None = None) -> dict[str, Tensor]:
        """The best allowed mask with at most round((1 - sparsity) * d) ones, d the number of scores.

        Ties go to the earlier position; -inf is never chosen. Masks are contiguous bool tensors of the
        scores' shapes, on their device.
        """

    def draw(
        self, like: Mapping[str, Tensor], generator: torch.Generator, sparsity: float | None = None
    ) -> dict[str, Tensor]:
        """An allowed mask at random, uniform over the pattern's units, with the budget of :meth:`select`."""
        return self.select(random_scores(like, generator=generator), sparsity)

    @abstractmethod
    def exchange(
        self,
        masks: Mapping[str, Tensor],
        keep: Choice,
        grow: Choice,
        *,
        sparsity: float | None = None,
        ratio: float,
    ) -> dict[str, Tensor]:
        """Drop, then grow (Algorithm 2, option II).

        N_drop = round(ratio * kept) of the kept weights go, those with the smallest ``keep``; then the mask
        grows back to its budget among all weights that are not kept now, the just dropped included.

        Args:
            masks: what is kept, as :meth:`select` or :meth:`exchange` returned it.
            keep: scores of the kept weights; the paper's is |gradient|. A generator drops at random.
            grow: scores of which the largest grow, or a generator: then growth is uniformly random over the
                pattern's units (entries, filters, ...).
            sparsity: as in :meth:`select`. The budget is computed from it each time, so it never drifts.
            ratio: part of the kept weights to drop, in [0, 1].
        """


@dataclass(frozen=True)
class Unstructured(Pattern):
    """Any set of weights: the global top-k, with exactly round((1 - sparsity) * d) ones."""

    def select(self, scores: Scores, sparsity: float | None = None) -> dict[str, Tensor]:
        """See :meth:`Pattern.select`."""
        return top_mask(scores, _budget(scores, sparsity, self))

    def draw(
        self, like: Mapping[str, Tensor], generator: torch.Generator, sparsity: float | None = None
    ) -> dict[str, Tensor]:
        return random_mask(like, _budget(like, sparsity, self), generator=generator)

    def exchange(
        self,
        masks: Mapping[str, Tensor],
        keep: Choice,
        grow: Choice,
        *,
        sparsity: float | None = None,
        ratio: float,
    ) -> dict[str, Tensor]:
        """See :meth:`Pattern.exchange`."""
        _check_exchange(masks, keep, grow, ratio)
        budget = _budget(masks, sparsity, self)
        kept = count_true(masks)
        left = min(kept - round(ratio * kept), budget)
        if isinstance(keep, torch.Generator):
            survivors = random_mask(masks, left, generator=keep, among=masks)
        else:
            survivors = top_mask(keep, left, among=masks)
        if isinstance(grow, torch.Generator):
            return random_mask(survivors, budget, generator=grow, first=survivors)
        return top_mask(grow, budget, first=survivors)


@dataclass(frozen=True)
class Structured(Pattern):
    """Whole units: ``"tensor"``, ``"filter"`` (index along dim 0) or ``"column"`` (index along dim 1).

    A unit's score is the mean of its weights' scores. Units are taken by falling score while they fit into
    round((1 - sparsity) * d) weights, so the number kept is at most the budget and no further unit would fit.
    Each entry of a 1-D tensor is its own filter and column; a 0-D tensor is one unit.

    :meth:`exchange` keeps, of the kept units, what fits into kept - N_drop weights by ``keep``: at least
    N_drop weights are dropped. Random growth draws once per unit.
    """

    unit: Unit = "filter"

    def __post_init__(self) -> None:
        _check_choice("unit", self.unit, get_args(Unit))

    def select(self, scores: Scores, sparsity: float | None = None) -> dict[str, Tensor]:
        """See :meth:`Pattern.select`."""
        return self._fill(unit_scores(scores, self.unit), scores, sparsity)

    def draw(
        self, like: Mapping[str, Tensor], generator: torch.Generator, sparsity: float | None = None
    ) -> dict[str, Tensor]:
        units = unit_masks({name: torch.zeros_like(t, dtype=torch.bool) for name, t in like.items()}, self.unit)
        return self._fill(random_scores(units, generator=generator), like, sparsity)

    def exchange(
        self,
        masks: Mapping[str, Tensor],
        keep: Choice,
        grow: Choice,
        *,
        sparsity: float | None = None,
        ratio: float,
    ) -> dict[str, Tensor]:
        """See :meth:`Pattern.exchange`."""
        _check_exchange(masks, keep, grow, ratio)
        budget, kept, sizes = _budget(masks, sparsity, self), count_true(masks), self._sizes(masks)
        units = unit_masks(masks, self.unit)
        left = min(kept - round(ratio * kept), budget)
        survivors = fill_greedily(self._unit_scores(keep, units), sizes, left, among=units)
        others = {name: ~mask for name, mask in survivors.items()}
        free = budget - sum(sizes[name] * count_true({name: mask}) for name, mask in survivors.items())
        grown = fill_greedily(self._unit_scores(grow, units), sizes, free, among=others)
        return self._spread({name: survivors[name] | grown[name] for name in masks}, masks)

    def _fill(
        self, units: Mapping[str, Tensor], like: Mapping[str, Tensor], sparsity: float | None
    ) -> dict[str, Tensor]:
        chosen = fill_greedily(units, self._sizes(like), _budget(like, sparsity, self))
        return self._spread(chosen, like)

    def _unit_scores(self, choice: Choice, units: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if isinstance(choice, torch.Generator):
            return random_scores(units, generator=choice)
        return unit_scores({name: choice[name] for name in units}, self.unit)

    def _sizes(self, like: Mapping[str, Tensor]) -> dict[str, int]:
        return {name: tensor.numel() // max(1, unit_count(tensor.shape, self.unit)) for name, tensor in like.items()}

    def _spread(self, units: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return spread(units, like, self.unit)


@dataclass(frozen=True)
class NM(Pattern):
    """``n`` of every ``m`` consecutive entries of the im2col matrix (O, C * kh * kw).

    axis="output" groups entries along O, the dimension contracted in dX = dY · W; axis="input" along C * kh
    * kw. A last group with fewer than m entries is kept whole (remainder="dense") or refused ("error").
    Tensors with fewer than two dimensions are kept whole (vectors="dense") or never perturbed ("none").

    :meth:`exchange` drops N_drop = round(ratio * kept) of the entries that are kept in full groups, over all
    tensors together, and refills every group to n.
    """

    n: int
    m: int
    axis: Axis = "output"
    remainder: Literal["dense", "error"] = "dense"
    vectors: Literal["dense", "none"] = "dense"

    def __post_init__(self) -> None:
        _check_n_of_m(self.n, self.m)
        _check_choice("axis", self.axis, get_args(Axis))
        _check_choice("remainder", self.remainder, ("dense", "error"))
        _check_choice("vectors", self.vectors, ("dense", "none"))

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

    def exchange(
        self,
        masks: Mapping[str, Tensor],
        keep: Choice,
        grow: Choice,
        *,
        sparsity: float | None = None,
        ratio: float,
    ) -> dict[str, Tensor]:
        """See :meth:`Pattern.exchange`."""
        _check_implied(self, sparsity)
        _check_exchange(masks, keep, grow, ratio)
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

    This is :class:`NM` along the output axis of the matrix of filter scores (O, 1), and its exchange drops
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

    def exchange(
        self,
        masks: Mapping[str, Tensor],
        keep: Choice,
        grow: Choice,
        *,
        sparsity: float | None = None,
        ratio: float,
    ) -> dict[str, Tensor]:
        """See :meth:`Pattern.exchange`."""
        _check_implied(self, sparsity)
        _check_exchange(masks, keep, grow, ratio)
        units = _as_rows(unit_masks(masks, "filter"), masks)
        inner = self._inner().exchange(units, self._choice(keep), self._choice(grow), ratio=ratio)
        return self._spread(inner, masks)

    def _inner(self) -> NM:
        return NM(self.n, self.m, remainder=self.remainder, vectors=self.vectors)

    def _choice(self, choice: Choice) -> Choice:
        return choice if isinstance(choice, torch.Generator) else self._means(choice)

    def _means(self, scores: Scores) -> dict[str, Tensor]:
        return _as_rows(unit_scores(scores, "filter"), scores)

    def _spread(self, rows: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return spread({name: row.reshape(-1) for name, row in rows.items()}, like, "filter")


@dataclass(frozen=True)
class PerLayer(Pattern):
    """``inner`` applied to every tensor alone, each with its own budget round((1 - sparsity) * its size)."""

    inner: Pattern

    @property
    def implied_sparsity(self) -> float | None:
        """That of the inner pattern."""
        return self.inner.implied_sparsity

    def select(self, scores: Scores, sparsity: float | None = None) -> dict[str, Tensor]:
        """See :meth:`Pattern.select`."""
        masks: dict[str, Tensor] = {}
        for name, score in scores.items():
            masks |= self.inner.select({name: score}, sparsity)
        return masks

    def draw(
        self, like: Mapping[str, Tensor], generator: torch.Generator, sparsity: float | None = None
    ) -> dict[str, Tensor]:
        masks: dict[str, Tensor] = {}
        for name, tensor in like.items():
            masks |= self.inner.draw({name: tensor}, generator, sparsity)
        return masks

    def exchange(
        self,
        masks: Mapping[str, Tensor],
        keep: Choice,
        grow: Choice,
        *,
        sparsity: float | None = None,
        ratio: float,
    ) -> dict[str, Tensor]:
        """See :meth:`Pattern.exchange`."""
        _check_exchange(masks, keep, grow, ratio)
        result: dict[str, Tensor] = {}
        for name, mask in masks.items():
            own_keep, own_grow = (c if isinstance(c, torch.Generator) else {name: c[name]} for c in (keep, grow))
            result |= self.inner.exchange({name: mask}, own_keep, own_grow, sparsity=sparsity, ratio=ratio)
        return result


def as_pattern(value: Pattern | str) -> Pattern:
    """A pattern from its name.

    Names are "unstructured", "tensor", "filter", "column", and "2:4", "2:4 input", "2:4 filters" for any n:m.
    """
    if isinstance(value, Pattern):
        return value
    if isinstance(value, str):
        words = " ".join(value.lower().split())
        if words == "unstructured":
            return Unstructured()
        for unit in get_args(Unit):
            if words == unit:
                return Structured(unit)
        if match := re.fullmatch(r"(\d+):(\d+)(?: (output|input|filters))?", words):
            n, m = int(match[1]), int(match[2])
            if match[3] == "filters":
                return NMFilters(n, m)
            return NM(n, m, axis="input" if match[3] == "input" else "output")
    known = ("unstructured", *get_args(Unit), "2:4", "2:4 input", "2:4 filters")
    nearest = sorted(known, key=lambda name: -difflib.SequenceMatcher(None, str(value).lower(), name).ratio())
    raise ValueError(
        f"pattern must be a Pattern or one of {', '.join(map(repr, nearest))}, with any n:m for 2:4, got {value!r}"
    )


def _budget(like: Mapping[str, Tensor], sparsity: float | None, pattern: Pattern) -> int:
    if sparsity is None:
        raise ValueError(f"sparsity must be given with {pattern}, got None; 0.5 perturbs half of the weights")
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity must be in [0, 1], got {sparsity}; 0 perturbs every weight, 1 none")
    return round((1 - sparsity) * sum(tensor.numel() for tensor in like.values()))


def _check_implied(pattern: NM | NMFilters, sparsity: float | None) -> None:
    implied = pattern.implied_sparsity
    if sparsity is not None and not math.isclose(sparsity, implied, abs_tol=1e-9):
        raise ValueError(
            f"sparsity must be {implied:g} or left out with {pattern}, which implies it, got {sparsity}; "
            "change n and m to change the sparsity"
        )


def _check_exchange(masks: Mapping[str, Tensor], keep: Choice, grow: Choice, ratio: float) -> None:
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio must be in [0, 1], got {ratio}; 0 keeps the mask, 1 drops all of it")
    for label, choice in (("keep", keep), ("grow", grow)):
        if not isinstance(choice, torch.Generator):
            check_alike(masks, choice, label=label)
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise ValueError(f"masks[{name!r}] must be a bool tensor, got {mask.dtype}; convert with .bool()")


def _check_n_of_m(n: int, m: int) -> None:
    if m < 1:
        raise ValueError(f"m must be at least 1, got {m}; it is the size of a group, 4 in 2:4")
    if not 0 <= n <= m:
        raise ValueError(f"n must be between 0 and m={m}, got {n}; n of every m consecutive entries are kept")


def _check_choice(argument: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _as_rows(units: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """(O,) -> (O, 1) for the tensors that are matrices, so that a filter is a row with one entry."""
    return {name: unit[:, None] if like[name].ndim >= 2 else unit for name, unit in units.items()}
