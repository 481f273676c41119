"""`select.top_mask` and `select.random_mask` for the parts of tensors: the same masks, with the same exact counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sparsesam.distributed.shards import Shards
from sparsesam.masks.draws import draw_bytes, draw_seed, draw_uniform, tie_keys
from sparsesam.masks.errors import NonFiniteScoreError
from sparsesam.masks.sharded.threshold import equal, kth_largest, larger, ordered_keys

Parts = Mapping[str, Tensor]


def count_kept(masks: Parts, shards: Shards) -> int:
    """The number of ones on all ranks."""
    return shards.sum_of(sum(int(masks[name].count_nonzero()) for name in shards.counted(masks)))[0]


def top_mask(
    scores: Parts, count: int, shards: Shards, *, among: Parts | None = None, first: Parts | None = None
) -> dict[str, Tensor]:
    """The ``count`` largest scores of all ranks, ties by their place in the whole tensors; -inf is never chosen."""
    refuse_nan(scores, shards)
    wide = any(score.dtype == torch.float64 for score in scores.values())
    bits, dtype = (64, torch.float64) if wide else (32, torch.float32)
    free = _free(scores, among, first)
    for name, score in scores.items():
        free[name] &= score > -math.inf
    keys = {name: ordered_keys(score.to(dtype)) for name, score in scores.items()}
    return _largest(keys, bits, free, first, count, shards)


def random_mask(
    like: Parts,
    count: int,
    shards: Shards,
    *,
    generator: torch.Generator,
    among: Parts | None = None,
    first: Parts | None = None,
) -> dict[str, Tensor]:
    """``count`` entries at random, those that `select.random_mask` would choose of the whole tensors."""
    free = _free(like, among, first)
    draws = random_bytes(like, shards, generator)
    wanted, population = _wanted(free, first, count, shards)
    chosen = {name: torch.zeros_like(mask) for name, mask in free.items()}
    if min(wanted, population) > 0:
        counted = [draws[name][free[name]].long() for name in shards.counted(free)]
        cut = kth_largest(counted, min(wanted, population), 8, shards)
        chosen = {name: free[name] & (draws[name] > cut.key) for name in free}
        tied = {name: free[name] & (draws[name] == cut.key) for name in free}
        seed = draw_seed(generator)
        lucky = _best_by_position(tied, cut.wanted, lambda places: ~tie_keys(places, seed), 64, shards)
        chosen = {name: chosen[name] | lucky[name] for name in free}
    return chosen if first is None else {name: chosen[name] | first[name] for name in chosen}


def random_bytes(like: Parts, shards: Shards, generator: torch.Generator) -> dict[str, Tensor]:
    """The part of what one process would draw. Every rank draws all of it, one tensor at a time."""
    draw = draw_bytes(generator)
    return {
        name: part.of(draw(math.prod(part.shape)).view(part.shape)).to(like[name].device)
        for name, part in ((name, shards.parts[name]) for name in like)
    }


def random_scores(like: Parts, shards: Shards, generator: torch.Generator) -> dict[str, Tensor]:
    """The same of `select.random_scores`."""
    found = {}
    for name, one in like.items():
        part = shards.parts[name]
        found[name] = part.of(draw_uniform(math.prod(part.shape), generator).view(part.shape)).to(one.device)
    return found


def _largest(
    keys: Parts, bits: int, free: dict[str, Tensor], first: Parts | None, count: int, shards: Shards
) -> dict[str, Tensor]:
    wanted, population = _wanted(free, first, count, shards)
    if min(wanted, population) == 0:
        chosen = {name: torch.zeros_like(mask) for name, mask in free.items()}
    else:
        counted = [keys[name][free[name]] for name in shards.counted(keys)]
        cut = kth_largest(counted, min(wanted, population), bits, shards)
        chosen = {name: free[name] & larger(keys[name], cut.key, bits) for name in free}
        tied = {name: free[name] & equal(keys[name], cut.key) for name in free}
        if cut.wanted < cut.equal:
            tied = _earliest(tied, cut.wanted, shards)
        chosen = {name: chosen[name] | tied[name] for name in free}
    return chosen if first is None else {name: chosen[name] | first[name] for name in chosen}


def _earliest(tied: dict[str, Tensor], count: int, shards: Shards) -> dict[str, Tensor]:
    """Those of the marked entries that come first in the whole tensors."""
    bits = shards.total.bit_length()
    return _best_by_position(tied, count, lambda places: 2**bits - 1 - places, bits, shards)


def _best_by_position(
    marked: dict[str, Tensor], count: int, key_of: Callable[[Tensor], Tensor], bits: int, shards: Shards
) -> dict[str, Tensor]:
    """The ``count`` marked entries with the largest keys, which are different for all positions in the whole."""
    offset, entries, keys = 0, {}, {}
    for name, mask in marked.items():
        entries[name] = mask.reshape(-1).nonzero().squeeze(1)
        keys[name] = key_of(shards.parts[name].positions(entries[name]) + offset)
        offset += math.prod(shards.parts[name].shape)
    cut = kth_largest([keys[name] for name in shards.counted(marked)], count, bits, shards)
    best = {}
    for name, mask in marked.items():
        flat = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
        flat[entries[name][larger(keys[name], cut.key, bits) | equal(keys[name], cut.key)]] = True
        best[name] = flat.view(mask.shape)
    return best


def _free(like: Parts, among: Parts | None, first: Parts | None) -> dict[str, Tensor]:
    """What may be chosen beside ``first``."""
    free = {}
    for name, one in like.items():
        free[name] = (
            torch.ones(one.shape, dtype=torch.bool, device=one.device) if among is None else among[name].clone()
        )
        if first is not None:
            free[name] &= ~first[name]
    return free


def _wanted(free: Parts, first: Parts | None, count: int, shards: Shards) -> tuple[int, int]:
    """How many are still to be chosen, and of how many."""
    population = sum(int(free[name].count_nonzero()) for name in shards.counted(free))
    certain = 0 if first is None else sum(int(first[name].count_nonzero()) for name in shards.counted(first))
    population, certain = shards.sum_of(population, certain)
    return max(0, count - certain), population


def refuse_nan(scores: Parts, shards: Shards) -> None:
    """Raise on all ranks if any of them has a NaN."""
    bad = [name for name, score in scores.items() if bool(score.isnan().any())]
    if shards.sum_of(len(bad))[0]:
        where = f"scores[{bad[0]!r}] holds NaN" if bad else "scores hold NaN on another rank"
        raise NonFiniteScoreError(f"{where}, which has no rank; find where the gradient overflowed")
