"""Exact top-k over many tensors; with ``shards``, this process holds only a part of them.

The k-th largest score t of all tensors is found first (`kth_largest`), many times faster than torch.topk would choose
(python -m benchmarks selection). Everything above t is chosen, then entries equal to t in the order of their position
in the whole tensors, so that ranks choose the same entries as one process would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards
from sparsesam.utils.checks import NonFiniteScoreError

Tensors = Mapping[str, Tensor]
BoolMasks = dict[str, Tensor]  # bool
Unit = Literal["tensor", "filter", "column"]
_DIGIT = 11  # bits


def top_mask(scores: Tensors, count: int, *, among: Tensors | None = None, shards: Shards | None = None) -> BoolMasks:
    """Mark the ``count`` largest scores of all tensors together.

    m = argmax { sum_i m_i s_i : m in {0,1}^d, sum_i m_i = count }, ties going to the earlier position (order
    of the mapping, then flat index). A score of -inf is never chosen, even if fewer than ``count`` remain;
    +inf comes first; NaN raises ValueError. Scores of different dtypes are compared by value. Only entries of the masks
    ``among`` can be chosen. Scores are on one device, and so are the masks, contiguous and of the scores' shapes.
    """
    shards = shards or Shards.whole(scores)
    check_scores(scores, shards)
    wide = any(score.dtype == torch.float64 for score in scores.values())
    values = {name: s.detach().reshape(-1).to(torch.float64 if wide else torch.float32) for name, s in scores.items()}
    chosen = {name: value > -math.inf for name, value in values.items()}
    for name, mask in (among or {}).items():
        chosen[name] &= mask.reshape(-1)
    if count_true(chosen, shards) > count:
        threshold = kth_largest(values, chosen, count, shards) if count else math.inf
        for name, mask in chosen.items():
            mask &= values[name] >= threshold
        if surplus := count_true(chosen, shards) - count:
            _clear_last(values, threshold, chosen, surplus, shards)
    return {name: mask.view(scores[name].shape) for name, mask in chosen.items()}


def _clear_last(values: Tensors, tied_at: float, chosen: Tensors, surplus: int, shards: Shards) -> None:
    """Clear the last ``surplus`` of the chosen entries with this value."""
    tied = {name: ((values[name] == tied_at) & mask).nonzero().squeeze(1) for name, mask in chosen.items()}
    positions, offset = {}, 0
    for name, places in tied.items():
        positions[name] = offset + shards.parts[name].positions(places)
        offset += shards.parts[name].shape.numel()
    every = {name: torch.ones_like(places, dtype=torch.bool) for name, places in tied.items()}
    first_left_out = kth_largest(positions, every, surplus, shards)
    for name, mask in chosen.items():
        mask[tied[name]] = positions[name] < first_left_out


def axis_of(unit: Unit, dimensions: int) -> int | None:
    """Returns the dimension along which units are counted; None: the tensor is one unit."""
    if unit == "tensor" or dimensions == 0:
        return None
    return 0 if dimensions == 1 or unit == "filter" else 1


def random_scores(
    like: Tensors, *, generator: torch.Generator, unit: Unit | None = None, shards: Shards | None = None
) -> dict[str, Tensor]:
    """Draw float32 scores, uniform in [0, 1), with the shapes and devices of ``like``; on the generator's device.

    The largest k of d are a uniformly random set, except for ties: about d / 2^24 entries share the smallest chosen
    score, and the earlier of them are chosen. With a ``unit``, all weights of one have the same score. Every rank draws
    for whole tensors, one at a time, and keeps its part.
    """
    parts = (shards or Shards.whole(like)).parts
    drawn = {}
    for name, tensor in like.items():
        shape = sizes = parts[name].shape
        if unit is not None:
            axis = axis_of(unit, len(shape))
            sizes = torch.Size(size if dim == axis else 1 for dim, size in enumerate(shape))
        whole = torch.rand(sizes, generator=generator, device=generator.device).expand(shape)
        drawn[name] = parts[name].of(whole).to(tensor.device)
    return drawn


def count_true(masks: Tensors, shards: Shards | None = None) -> int:
    """Returns the number of true entries in all masks, over all ranks."""
    shards = shards or Shards.whole(masks)
    return shards.sum_of(sum(int(masks[name].count_nonzero()) for name in shards.counted(masks)))[0]


def check_scores(scores: Tensors, shards: Shards) -> None:
    """Raise ValueError for scores that are not floating point, and on all ranks if any rank has a NaN."""
    for name, score in scores.items():
        if not score.is_floating_point():
            raise ValueError(f"scores[{name!r}] must be floating point, got {score.dtype}; convert with .float()")
    bad = [name for name, score in scores.items() if score.numel() and bool(score.detach().amax().isnan())]
    if shards.sum_of(len(bad))[0]:
        where = f"scores[{bad[0]!r}] holds NaN" if bad else "scores hold NaN on another rank"
        raise NonFiniteScoreError(
            f"{where}, which has no rank; replace it (-inf is never chosen) or find where the gradient overflowed"
        )


def kth_largest(vectors: Tensors, allowed: Tensors, k: int, shards: Shards) -> float:
    """Returns the k-th largest of the allowed entries on all ranks, of which there must be at least k >= 1.

    The entries are float32, float64, or non-negative int64.
    """
    if shards.mesh is None and all(vector.device.type == "cpu" for vector in vectors.values()):
        # np.compress is several times faster than vector[mask].
        entries = np.concatenate([np.compress(allowed[name].numpy(), v.numpy()) for name, v in vectors.items()])
        entries.partition(len(entries) - k)
        return float(entries[len(entries) - k])
    counted = [vector[allowed[name] & shards.parts[name].counts] for name, vector in vectors.items()]
    return kth_largest_by_digits(torch.cat(counted), k, shards)


def kth_largest_by_digits(values: Tensor, k: int, shards: Shards) -> float:
    """A radix select, with histograms of 2048 counts.

    Each round takes eleven more bits of the keys: the ranks sum their histograms of these bits, and continue with the
    bin that contains the k-th largest. The number of rounds, of 16 kB each, depends only on the width of the dtype.
    """
    bits = 8 * values.element_size()
    integers = torch.int32 if bits == 32 else torch.int64
    # Unsigned integers in the order of the numbers, held in an int64; -0.0 + 0 is 0.0.
    pattern = (values + 0).view(integers).long()
    keys = torch.where(pattern < 0, ~pattern, pattern + (2**31 if bits == 32 else -(2**63)))
    key = 0
    for shift in reversed(range(0, bits, _DIGIT)):
        digits = (keys >> shift) & (2 ** min(_DIGIT, bits - shift) - 1)
        counts = shards.sum(torch.bincount(digits, minlength=2**_DIGIT).cpu())
        from_top = counts.flip(0).cumsum(0)
        place = int(torch.searchsorted(from_top, k))
        digit = 2**_DIGIT - 1 - place
        k -= int(from_top[place] - counts[digit])
        key |= digit << shift
        keys = keys[digits == digit]
    half = 2 ** (bits - 1)
    return torch.tensor(key - half if key >= half else ~key, dtype=integers).view(values.dtype).item()
