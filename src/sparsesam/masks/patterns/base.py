"""The base class of patterns, and the two simplest ones: `Unstructured` and `PerLayer`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sparsesam.distributed.shards import Shards
from sparsesam.masks.select import BoolMasks, Tensors, Unit, count_true, random_scores, top_mask
from sparsesam.utils.checks import check_bool, check_number


class Pattern:
    """A family of allowed masks: the base class of all patterns.

    With ``shards``, tensors are the parts that this rank holds, and all ranks must call together; masks are then the
    parts of the masks that one process would choose.
    """

    @property
    def implied_sparsity(self) -> float | None:
        """The sparsity that the pattern implies, or None if it must be given."""
        return None

    @property
    def unit(self) -> Unit | None:
        """The units that are kept or dropped as a whole, and drawn with one random number; None: every weight."""
        return None

    def check_sparsity(self, sparsity: float | None) -> float:
        """Returns the given or implied sparsity; raises ValueError if it is missing, contradictory or not in [0, 1]."""
        implied = self.implied_sparsity
        given = implied if sparsity is None else sparsity
        if given is None:
            raise ValueError(f"sparsity must be given with {self}, got None; 0.5 perturbs half of the weights")
        check_number("sparsity", given, "0 perturbs every weight, 1 none", most=1)
        if implied is not None and not math.isclose(given, implied, abs_tol=1e-9):
            raise ValueError(
                f"sparsity must be left out with {self}, which implies {implied:g}, got {given}; change n and m to "
                "change it"
            )
        return given

    def select(self, scores: Tensors, sparsity: float | None = None, *, shards: Shards | None = None) -> BoolMasks:
        """Returns the best allowed mask with at most round((1 - sparsity) * d) ones, d the number of scores.

        Ties go to the earlier position; -inf is never chosen. Masks are contiguous bool tensors of the
        scores' shapes, on their device.
        """
        return self._grow(scores, None, self.check_sparsity(sparsity), shards or Shards.whole(scores))

    def draw(
        self, like: Tensors, generator: torch.Generator, sparsity: float | None = None, *, shards: Shards | None = None
    ) -> BoolMasks:
        """Draw an allowed mask at random, uniformly over the pattern's units, with the budget of `select`."""
        return self.select(self._scores(generator, like, shards or Shards.whole(like)), sparsity, shards=shards)

    def drop_and_grow(
        self,
        masks: Tensors,
        keep: Tensors | torch.Generator,
        grow: Tensors | torch.Generator,
        *,
        sparsity: float | None = None,
        ratio: float,
        shards: Shards | None = None,
    ) -> BoolMasks:
        """Drop, then grow (Algorithm 2, option II).

        N_drop = round(ratio * kept) of the kept weights are dropped, those with the smallest ``keep``; then the mask
        grows back to its budget among all weights that are not kept, including those just dropped.

        Args:
            masks: the kept weights, as returned by `select` or `drop_and_grow`.
            keep: scores of the kept weights; the paper's is |gradient|. A generator drops at random.
            grow: scores, of which the largest grow; a generator grows uniformly at random over the pattern's units.
            sparsity: as in `select`. The budget is computed from it each time, so it never drifts.
            ratio: the share of the kept weights to drop, in [0, 1].
            shards: which part of the tensors this rank holds; all of them by default.
        """
        sparsity, shards = self.check_sparsity(sparsity), shards or Shards.whole(masks)
        check_number("ratio", ratio, "0 keeps the mask, 1 drops all of it", most=1)
        check_bool("masks", masks)
        for label, scores in (("keep", keep), ("grow", grow)):
            if not isinstance(scores, torch.Generator):
                _check_alike(masks, scores, label)
        left = self._drop(self._scores(keep, masks, shards), masks, sparsity, ratio, shards)
        return self._grow(self._scores(grow, masks, shards), left, sparsity, shards)

    def _scores(self, scores: Tensors | torch.Generator, like: Tensors, shards: Shards) -> Tensors:
        """Returns the scores, or random ones that are the same within a unit."""
        if not isinstance(scores, torch.Generator):
            return scores
        return random_scores(like, generator=scores, unit=self.unit, shards=shards)

    def _grow(self, scores: Tensors, first: Tensors | None, sparsity: float, shards: Shards) -> BoolMasks:
        """Returns the best allowed masks that contain ``first``; may modify ``first``."""
        budget = round((1 - sparsity) * shards.total)
        if first is None:
            return self._best(scores, budget, None, shards)
        free = {name: ~mask for name, mask in first.items()}
        grown = self._best(scores, budget - count_true(first, shards), free, shards)
        return {name: mask | first[name] for name, mask in grown.items()}

    def _drop(self, keep: Tensors, masks: Tensors, sparsity: float, ratio: float, shards: Shards) -> BoolMasks:
        """Returns the masks without the share ``ratio`` of kept weights with the smallest ``keep``."""
        kept, budget = count_true(masks, shards), round((1 - sparsity) * shards.total)
        return self._best(keep, min(kept - round(ratio * kept), budget), masks, shards)

    def _best(self, scores: Tensors, count: int, among: Tensors | None, shards: Shards) -> BoolMasks:
        """Mark the ``count`` weights with the largest scores ``among`` those of a mask."""
        return top_mask(scores, count, among=among, shards=shards)


def _check_alike(masks: Tensors, scores: Tensors, label: str) -> None:
    if masks.keys() != scores.keys():
        odd = sorted(masks.keys() ^ scores.keys())
        raise ValueError(f"{label} must have the same names as the masks, but {odd} are in only one of them")
    for name, mask in masks.items():
        if scores[name].shape != mask.shape:
            raise ValueError(f"{label}[{name!r}] must have shape {tuple(mask.shape)}, got {tuple(scores[name].shape)}")


@dataclass(frozen=True)
class Unstructured(Pattern):
    """Any set of weights: the global top-k, with exactly round((1 - sparsity) * d) ones."""


@dataclass(frozen=True)
class PerLayer(Pattern):
    """Applies ``inner`` to each tensor separately, with its own budget round((1 - sparsity) * its size)."""

    inner: Pattern

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Pattern):
            raise TypeError(f"inner must be a Pattern, such as NM(2, 4), got {self.inner!r}")

    @property
    def implied_sparsity(self) -> float | None:
        """The implied sparsity of the inner pattern."""
        return self.inner.implied_sparsity

    @property
    def unit(self) -> Unit | None:
        """The units of the inner pattern."""
        return self.inner.unit

    def _grow(self, scores: Tensors, first: Tensors | None, sparsity: float, shards: Shards) -> BoolMasks:
        masks: BoolMasks = {}
        for name, score in scores.items():
            own = None if first is None else {name: first[name]}
            masks |= self.inner._grow({name: score}, own, sparsity, shards.only(name))
        return masks

    def _drop(self, keep: Tensors, masks: Tensors, sparsity: float, ratio: float, shards: Shards) -> BoolMasks:
        left: BoolMasks = {}
        for name, mask in masks.items():
            left |= self.inner._drop({name: keep[name]}, {name: mask}, sparsity, ratio, shards.only(name))
        return left
