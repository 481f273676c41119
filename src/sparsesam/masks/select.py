"""Exact top-k and exact random subsets over many tensors, in a few linear passes.

The k-th largest of d scores is found as Floyd and Rivest do: a sample of about d^(2/3) entries gives two
pivots lo <= hi that enclose the k-th largest with near certainty; one pass

    counts  #{x >= hi}  and  #{x > lo},     gathers the few  lo < x < hi,

which names the threshold t and the number r of entries equal to t that are taken, or else shrinks the
bracket for another round. A last pass writes x > t and the first r entries with x == t. Many equal scores
cost at most one more count: a value that is frequent enough to matter is itself a pivot, and pivots are
counted, not gathered.

On the CPU the passes run over cache-sized numpy views, elsewhere over torch tensors; the masks are identical.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsesam.masks.draws import draw_bytes, draw_seed, draw_uniform, tie_keys
from sparsesam.masks.errors import NonFiniteScoreError

# A numpy array (CPU) or a torch tensor (other devices): the passes use only operators both understand.
Array = Any
Masks = Mapping[str, Tensor]

_HOST_PIECE_BYTES = 1 << 18
_DEVICE_PIECE = 1 << 24
_GATHER_ALL = 1 << 15
_SAMPLE = 1 << 13
_NUMPY_DTYPES = {torch.float64: np.float64, torch.float32: np.float32, torch.uint8: np.uint8}


def top_mask(
    scores: Mapping[str, Tensor], count: int, *, among: Masks | None = None, first: Masks | None = None
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

    Returns:
        name -> contiguous bool tensor of the score's shape, on its device.
    """
    source = _Source(scores, _common_dtype(scores), (-math.inf, math.inf), among, first)
    wanted = _remaining(count, first)
    cut = _find_cut(source, wanted)
    if cut.value == -math.inf:
        cut = _Cut(cut.value, 0)
    masks = _empty_masks(scores)
    _write(source, masks, cut)
    return masks


def random_mask(
    like: Mapping[str, Tensor],
    count: int,
    *,
    generator: torch.Generator,
    among: Masks | None = None,
    first: Masks | None = None,
) -> dict[str, Tensor]:
    """Mark a uniformly random set of ``count`` entries: every set of that size is equally likely.

    Each entry draws one random byte and the largest bytes win; the entries that share the last winning byte
    (about one in 256) are ranked by 64 bits made of their position and a seed that is drawn for them. Eight bits
    per entry are enough, no tie is left to the position, and ranks that hold parts of the tensors come to the same set.

    ``among`` and ``first`` are those of :func:`top_mask`. Draws happen on the generator's device.
    """
    draws = _random_bytes(like, generator)
    source = _Source(draws, torch.uint8, (0, 255), among, first)
    wanted = min(_remaining(count, first), source.population)
    cut = _find_cut(source, wanted)
    masks = _empty_masks(like)
    tied = _write(source, masks, _Cut(cut.value, 0), collect_ties=True)
    lucky = np.zeros(sum(len(positions) for _, _, positions in tied), dtype=bool)
    if cut.ties > 0:
        places = np.concatenate([start + _as_numpy(positions) for _, start, positions in tied])
        keys = tie_keys(torch.from_numpy(places), draw_seed(generator)).numpy().view(np.uint64)
        lucky[np.argpartition(keys, cut.ties - 1)[: cut.ties]] = True
    for mask, _, positions in tied:
        chosen, lucky = lucky[: len(positions)], lucky[len(positions) :]
        mask[positions] = chosen if isinstance(mask, np.ndarray) else torch.from_numpy(chosen).to(mask.device)
    return masks


def random_scores(like: Mapping[str, Tensor], *, generator: torch.Generator) -> dict[str, Tensor]:
    """Independent float32 scores, uniform on the multiples of 2^-24 in [0, 1), shaped and placed as ``like``.

    For a random set of given size prefer :func:`random_mask`, which is faster and free of ties.
    """
    return {
        name: draw_uniform(tensor.numel(), generator).to(tensor.device).view(tensor.shape)
        for name, tensor in like.items()
    }


def check_alike(expected: Mapping[str, Tensor], given: Mapping[str, Tensor], *, label: str) -> None:
    """Raise ValueError unless ``given`` has the names and shapes of ``expected``."""
    if expected.keys() != given.keys():
        odd = sorted(expected.keys() ^ given.keys())
        raise ValueError(f"{label} must have the same names as the scores, but {odd} are in only one of them")
    for name, tensor in expected.items():
        if given[name].shape != tensor.shape:
            raise ValueError(f"{label}[{name!r}] must have shape {tuple(tensor.shape)}, got {tuple(given[name].shape)}")


def count_true(masks: Masks) -> int:
    """Number of true entries over all masks."""
    return sum(_count(_flat(mask)) for mask in masks.values())


def native(tensor: Tensor) -> Array:
    """A numpy view on the CPU (a float32 copy of half precision), else the tensor itself."""
    tensor = tensor.detach()
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    return tensor.numpy() if on_host(tensor) else tensor


def copy_mask(mask: Tensor) -> Tensor:
    """A contiguous copy; by numpy on the CPU, where waking torch's threads costs more than the copy."""
    copy = torch.empty(mask.shape, dtype=torch.bool, device=mask.device)
    native(copy)[...] = native(mask)
    return copy


def check_no_nan(name: str, scores: Tensor) -> None:
    """Raise ValueError if there is a NaN."""
    if scores.numel() and _has_nan(native(scores)):
        raise_nan(name)


def on_host(tensor: Tensor) -> bool:
    """Whether numpy can work on the tensor in place."""
    return tensor.device.type == "cpu"


def raise_nan(name: str) -> None:
    """Refuse a NaN in the scores of that name."""
    raise NonFiniteScoreError(
        f"scores[{name!r}] holds NaN, which has no rank; replace it (-inf is never chosen) or find where the "
        "gradient overflowed"
    )


@dataclass(frozen=True)
class _Cut:
    """Everything above ``value`` is chosen, and ``ties`` of the entries equal to it."""

    value: float
    ties: int


class _Source:
    """Scores read piece by piece in one dtype, with the entries that may be chosen."""

    def __init__(
        self,
        scores: Mapping[str, Tensor],
        dtype: torch.dtype,
        bounds: tuple[float, float],
        among: Masks | None,
        first: Masks | None,
    ) -> None:
        for label, masks in (("among", among), ("first", first)):
            if masks is not None:
                check_alike(scores, masks, label=label)
        self.scores, self.dtype, self.bounds, self.among, self.first = scores, dtype, bounds, among, first
        self._views: dict[str, tuple[Array, Array, Array]] = {}
        self.size = sum(tensor.numel() for tensor in scores.values())
        if among is None:
            self.population = self.size - (0 if first is None else count_true(first))
        elif first is None:
            self.population = count_true(among)
        else:
            self.population = sum(_count(allowed) for _, _, _, allowed in self.pieces())

    def pieces(self) -> Iterator[tuple[str, slice, Array, Array | None]]:
        """Yield name, flat range, values and choosable entries (None: all)."""
        host = _HOST_PIECE_BYTES // self.dtype.itemsize
        for name, tensor in self.scores.items():
            flat, among, first = self.flat(name)
            length = host if on_host(tensor) else _DEVICE_PIECE
            for start in range(0, tensor.numel(), length):
                part = slice(start, start + length)
                yield name, part, _widen(flat[part], self.dtype), _allowed(among, first, part)

    def flat(self, name: str) -> tuple[Array, Array, Array]:
        """Scores, among and first of one name, flattened; None for what was not given."""
        if name in self._views:
            return self._views[name]
        among = None if self.among is None else self.among[name]
        first = None if self.first is None else self.first[name]
        tensors = (self.scores[name], among, first)
        scores, allowed, certain = (None if tensor is None else _flat(tensor) for tensor in tensors)
        # Views are remembered; the copies that other layouts need live for one tensor at a time.
        if all(tensor is None or tensor.is_contiguous() for tensor in tensors):
            self._views[name] = (scores, allowed, certain)
        return scores, allowed, certain

    def sample(self, salt: int) -> Array:
        """Values at one pseudo-random position in each of about size^(2/3) equal strides, if choosable.

        The jitter inside the stride keeps periodic scores from fooling the sample; the positions depend on
        nothing but the sizes and ``salt``, and the final mask not even on those.
        """
        stride = max(1, self.size // max(_SAMPLE, int(self.size ** (2 / 3))))
        starts = np.arange(0, self.size, stride)
        positions = starts + np.random.default_rng(salt).integers(stride, size=len(starts))
        positions = positions[positions < self.size]
        offset, samples = 0, []
        for name, tensor in self.scores.items():
            edges = np.searchsorted(positions, [offset, offset + tensor.numel()])
            inside = positions[edges[0] : edges[1]] - offset
            offset += tensor.numel()
            if len(inside) == 0:
                continue
            index = inside if on_host(tensor) else torch.from_numpy(inside).to(tensor.device)
            flat, among, first = self.flat(name)
            values, allowed = _widen(flat[index], self.dtype), _allowed(among, first, index)
            samples.append(values if allowed is None else values[allowed])
        return _concatenate(samples)

    def count(self, relation: Callable[[Array, float], Array], pivot: float) -> int:
        """Number of choosable entries x with ``relation(x, pivot)``."""
        return sum(_count(_restrict(relation(x, pivot), allowed)) for _, _, x, allowed in self.pieces())

    def census(self, low: float, high: float, limit: int, *, check: bool) -> tuple[int, int, list[Array] | None]:
        """Return #{x >= high}, #{x > low} and the values strictly between, None if more than ``limit``."""
        from_high = above_low = 0
        between: list[Array] = []
        for name, _, values, allowed in self.pieces():
            if check and _has_nan(values):
                raise_nan(name)
            reached, above = _restrict(values >= high, allowed), _restrict(values > low, allowed)
            at_high, over_low = _count(reached), _count(above)
            from_high += at_high
            above_low += over_low
            if above_low - from_high > limit:
                between.clear()
            elif over_low > at_high:
                between.append(values[above ^ reached])
        return from_high, above_low, between if above_low - from_high <= limit else None


def _find_cut(source: _Source, count: int) -> _Cut:
    """The threshold t and ties r with #{x > t} + r = min(count, population)."""
    count = min(count, source.population)
    if count == 0:
        # Nothing to find, but a NaN is an error whatever the count.
        source.census(*source.bounds, limit=0, check=True)
        return _Cut(source.bounds[1], 0)
    low_end: float | None = None
    high_end: float | None = None
    # Entries at or above high_end, and strictly inside the bracket.
    above, inside = 0, source.population
    for salt in range(source.size + 1):
        low, high = low_end, high_end
        if inside > _GATHER_ALL:
            low, high = _pivots(source.sample(salt), low_end, high_end, (count - above) / inside)
        # A bracket without a sampled value inside cannot shrink by sampling, so it is gathered whole.
        narrower = low != low_end or high != high_end
        limit = max(_GATHER_ALL, inside // 16) if narrower else source.size
        low, high = source.bounds[0] if low is None else low, source.bounds[1] if high is None else high
        from_high, above_low, between = source.census(low, high, limit, check=salt == 0)
        if from_high < count <= above_low:
            if between is not None:
                return _cut_among(_concatenate(between), count - from_high)
            low_end, high_end, above, inside = low, high, from_high, above_low - from_high
        elif count <= from_high:
            above_high = above_low if low == high else source.count(operator.gt, high)
            if count > above_high:
                return _Cut(high, count - above_high)
            low_end, inside = high, above_high - above
        else:
            from_low = from_high if low == high else source.count(operator.ge, low)
            if count <= from_low:
                return _Cut(low, count - above_low)
            high_end, above, inside = low, from_low, above + inside - from_low
    raise AssertionError("unreachable: every round excludes at least one value")


def _pivots(
    sample: Array, low_end: float | None, high_end: float | None, share: float
) -> tuple[float | None, float | None]:
    """Two sample values that enclose the upper ``share`` quantile of the open bracket by four deviations."""
    if low_end is not None:
        sample = sample[sample > low_end]
    if high_end is not None:
        sample = sample[sample < high_end]
    size = len(sample)
    if size == 0:
        return low_end, high_end
    margin = 4 * math.sqrt(size * share * (1 - share)) + 4
    upper, lower = int(share * size - margin), int(share * size + margin)
    high = _kth_largest(sample, upper) if upper >= 1 else high_end
    low = _kth_largest(sample, lower) if lower <= size else low_end
    return low, high


def _cut_among(values: Array, count: int) -> _Cut:
    value = _kth_largest(values, count)
    return _Cut(value, count - _count(values > value))


def _write(
    source: _Source, masks: dict[str, Tensor], cut: _Cut, *, collect_ties: bool = False
) -> list[tuple[Array, int, Array]]:
    """Write ``first``, x > t and the first r of x == t.

    Optionally return where x == t: a piece of a flat mask, its place among all entries, positions in the piece.
    """
    left, tied = cut.ties, []
    starts = dict(zip(masks, itertools.accumulate((m.numel() for m in masks.values()), initial=0), strict=False))
    flats = {name: _flat(mask) for name, mask in masks.items()}
    for name, part, values, allowed in source.pieces():
        mask = flats[name][part]
        mask[...] = _restrict(values > cut.value, allowed)
        if left > 0 or collect_ties:
            equal = _restrict(values == cut.value, allowed)
            if collect_ties:
                tied.append((mask, starts[name] + part.start, _positions(equal)))
            elif (number := _count(equal)) <= left:
                mask |= equal
                left -= number
            else:
                mask[_positions(equal)[:left]] = True
                left = 0
        if source.first is not None:
            mask |= source.flat(name)[2][part]
    return tied


def _remaining(count: int, first: Masks | None) -> int:
    if count < 0:
        raise ValueError(f"count must be at least 0, got {count}; 0 chooses nothing")
    certain = 0 if first is None else count_true(first)
    if certain > count:
        raise ValueError(f"first marks {certain} entries but count is {count}; raise count or clear some of first")
    return count - certain


def _common_dtype(scores: Mapping[str, Tensor]) -> torch.dtype:
    """float64 if any score has it, else float32: both hold every narrower score exactly."""
    for name, tensor in scores.items():
        if not tensor.is_floating_point():
            raise ValueError(f"scores[{name!r}] must be floating point, got {tensor.dtype}; convert with .float()")
    wide = any(tensor.dtype == torch.float64 for tensor in scores.values())
    return torch.float64 if wide else torch.float32


def _empty_masks(like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty(tensor.shape, dtype=torch.bool, device=tensor.device) for name, tensor in like.items()}


def _random_bytes(like: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    total, offset, draws = sum(tensor.numel() for tensor in like.values()), 0, {}
    drawn = draw_bytes(generator)(total)
    for name, tensor in like.items():
        draws[name] = drawn[offset : offset + tensor.numel()].view(tensor.shape).to(tensor.device)
        offset += tensor.numel()
    return draws


def _flat(tensor: Tensor) -> Array:
    """All entries in row-major order; a view wherever the layout allows it."""
    flat = tensor.detach().reshape(-1)
    if not on_host(tensor):
        return flat
    # numpy has no bfloat16: read its bits, see _widen.
    return flat.view(torch.uint16).numpy() if flat.dtype == torch.bfloat16 else flat.numpy()


def _widen(values: Array, dtype: torch.dtype) -> Array:
    """Convert to ``dtype``, exactly; uint16 stands for bfloat16, the upper half of a float32."""
    if not isinstance(values, np.ndarray):
        return values.to(dtype)
    if values.dtype == np.uint16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(_NUMPY_DTYPES[dtype], copy=False)


def _allowed(among: Array | None, first: Array | None, index: Array) -> Array | None:
    if first is None:
        return None if among is None else among[index]
    others = ~first[index]
    return others if among is None else others & among[index]


def _restrict(condition: Array, allowed: Array | None) -> Array:
    if allowed is not None:
        condition &= allowed
    return condition


def _count(condition: Array) -> int:
    return int(np.count_nonzero(condition) if isinstance(condition, np.ndarray) else torch.count_nonzero(condition))


def _positions(condition: Array) -> Array:
    return np.flatnonzero(condition) if isinstance(condition, np.ndarray) else condition.nonzero().view(-1)


def _as_numpy(positions: Array) -> Array:
    return positions if isinstance(positions, np.ndarray) else positions.cpu().numpy()


def _has_nan(values: Array) -> bool:
    peak = values.max()
    return bool(peak != peak)


def _concatenate(arrays: list[Array]) -> Array:
    if not arrays:
        return np.empty(0)
    return np.concatenate(arrays) if isinstance(arrays[0], np.ndarray) else torch.cat(arrays)


def _kth_largest(values: Array, k: int) -> float:
    index = len(values) - k
    if isinstance(values, np.ndarray):
        found: float = np.partition(values, index)[index].item()
    else:
        found = torch.sort(values).values[index].item()
    return found
