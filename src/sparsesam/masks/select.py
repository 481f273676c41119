"""Exact top-k over many tensors, which this process holds whole or, with ``shards``, a part of.

The k-th largest score t of all tensors is found first (`threshold`). Everything above t is chosen, and of the entries
equal to t those that come first in the whole tensors, so that ranks choose what one process would.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards
from sparsesam.masks.checks import NonFiniteScoreError
from sparsesam.masks.threshold import kth_largest

Tensors = Mapping[str, Tensor]


def top_mask(
    scores: Tensors,
    count: int,
    *,
    among: Tensors | None = None,
    first: Tensors | None = None,
    shards: Shards | None = None,
) -> dict[str, Tensor]:
    """Mark the ``count`` largest scores of all tensors together.

    m = argmax { sum_i m_i s_i : m in {0,1}^d, sum_i m_i = count }, ties going to the earlier position (order
    of the mapping, then flat index). A score of -inf is never chosen, even if fewer than ``count`` remain;
    +inf comes first; NaN raises ValueError. The order is that of the numbers themselves, whatever mixture of
    dtypes holds them.

    Args:
        scores: name -> floating tensor; all on one device, any shapes.
        count: number of ones, at least 0.
        among: name -> bool tensor; only its true entries can be chosen, as if the others scored -inf.
        first: name -> bool tensor; its true entries are chosen before all others and count towards ``count``.
        shards: which part of the tensors this rank holds; all of them by default.

    Returns:
        name -> contiguous bool tensor of the score's shape, on its device.
    """
    shards = shards or Shards.whole(scores)
    for label, masks in (("among", among), ("first", first)):
        if masks is not None:
            check_alike(scores, masks, label=label)
    check_scores(scores, shards)
    count = _remaining(count, first, shards)
    if not scores:
        return {}
    wide = any(score.dtype == torch.float64 for score in scores.values())
    values = _joined(scores, scores).to(torch.float64 if wide else torch.float32)
    allowed = values > -math.inf
    if among is not None:
        allowed &= _joined(among, scores)
    if first is not None:
        allowed &= ~_joined(first, scores)
    sizes = [score.numel() for score in scores.values()]
    chosen = _largest(values, allowed, count, sizes, shards.only(*scores))
    if first is not None:
        chosen |= _joined(first, scores)
    return {name: mask.view(scores[name].shape) for name, mask in zip(scores, chosen.split(sizes), strict=True)}


def random_scores(like: Tensors, *, generator: torch.Generator, shards: Shards | None = None) -> dict[str, Tensor]:
    """Independent float32 scores, uniform in [0, 1), shaped and placed as ``like``; drawn on the generator's device.

    The largest k of d are a uniformly random set, but for ties: about d / 2^24 entries share the score at which the
    choice ends, and the earlier of them are chosen. Every rank draws for whole tensors, one at a time, and keeps its
    part.
    """
    parts = (shards or Shards.whole(like)).parts
    return {
        name: parts[name].of(torch.rand(parts[name].shape, generator=generator, device=generator.device)).to(one.device)
        for name, one in like.items()
    }


def count_true(masks: Tensors, shards: Shards | None = None) -> int:
    """Number of true entries over all masks, of all ranks."""
    shards = shards or Shards.whole(masks)
    return shards.sum_of(sum(int(masks[name].count_nonzero()) for name in shards.counted(masks)))[0]


def check_alike(expected: Tensors, given: Tensors, *, label: str) -> None:
    """Raise ValueError unless ``given`` has the names and shapes of ``expected``."""
    if expected.keys() != given.keys():
        odd = sorted(expected.keys() ^ given.keys())
        raise ValueError(f"{label} must have the same names as the scores, but {odd} are in only one of them")
    for name, tensor in expected.items():
        if given[name].shape != tensor.shape:
            raise ValueError(f"{label}[{name!r}] must have shape {tuple(tensor.shape)}, got {tuple(given[name].shape)}")


def check_scores(scores: Tensors, shards: Shards) -> None:
    """Raise ValueError for scores that are not floating point; on all ranks, if any of them has a NaN."""
    for name, score in scores.items():
        if not score.is_floating_point():
            raise ValueError(f"scores[{name!r}] must be floating point, got {score.dtype}; convert with .float()")
    bad = [name for name, score in scores.items() if score.numel() and bool(score.detach().amax().isnan())]
    if shards.sum_of(len(bad))[0]:
        where = f"scores[{bad[0]!r}] holds NaN" if bad else "scores hold NaN on another rank"
        raise NonFiniteScoreError(
            f"{where}, which has no rank; replace it (-inf is never chosen) or find where the gradient overflowed"
        )


def _remaining(count: int, first: Tensors | None, shards: Shards) -> int:
    if count < 0:
        raise ValueError(f"count must be at least 0, got {count}; 0 chooses nothing")
    certain = 0 if first is None else count_true(first, shards)
    if certain > count:
        raise ValueError(f"first marks {certain} entries but count is {count}; raise count or clear some of first")
    return count - certain


def _joined(tensors: Tensors, names: Iterable[str]) -> Tensor:
    return torch.cat([tensors[name].detach().reshape(-1) for name in names])


def _largest(values: Tensor, allowed: Tensor, count: int, sizes: list[int], shards: Shards) -> Tensor:
    """Marks the ``count`` largest of the allowed entries, or all of them; the tensors are joined in shards' order."""
    parts = list(shards.parts.values())
    own = torch.cat(
        [mask.new_full(mask.shape, part.counts) for part, mask in zip(parts, allowed.split(sizes), strict=True)]
    )

    def total(mask: Tensor) -> int:
        return shards.sum_of(int((mask & own).count_nonzero()))[0]

    if total(allowed) <= count:
        return allowed
    if count == 0:
        return torch.zeros_like(allowed)
    threshold = kth_largest(_entries(values, allowed & own), count, shards)
    chosen = (values >= threshold) & allowed
    surplus = total(chosen) - count
    if surplus:
        tied = (values == threshold) & allowed
        offsets = itertools.accumulate((part.shape.numel() for part in parts), initial=0)
        positions = torch.cat(
            [
                offset + part.positions(mask.nonzero().squeeze(1))
                for offset, part, mask in zip(offsets, parts, tied.split(sizes), strict=False)
            ]
        )
        chosen[tied] = positions < kth_largest(positions[own[tied]], surplus, shards)
    return chosen


def _entries(values: Tensor, chosen: Tensor) -> Tensor:
    if values.device.type == "cpu":  # several times faster than values[chosen], of torch or of numpy
        return torch.from_numpy(np.compress(chosen.numpy(), values.numpy()))
    return values[chosen]
