"""Draws random samples, without replacement and with the caller's generator, as collated batches."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    default_collate,
)

from sparsesam.utils.batches import batch_size, slice_batch
from sparsesam.utils.checks import check_count


def draw_batches(data: Any, count: int, *, generator: torch.Generator, chunk: int = 128) -> Iterator[Any]:
    """Yield ``count`` random samples of ``data`` as batches of at most ``chunk`` samples.

    ``data`` is a map-style dataset, a data loader, a tuple, list or dictionary of tensors of equal first dimension, or
    an iterable of batches. Only the last cannot be sampled at random: its batches are read from the beginning. Batches
    are pytrees of tensors with the samples in dimension 0.
    """
    check_count("count", count, "it is the number of samples")
    indices: Sequence[int]
    fetch: Callable[[list[int]], Any]
    if _is_tensors(data):
        indices, fetch = range(_equal_length(data)), lambda chosen: tree_map(lambda part: part[chosen], data)
    elif (
        isinstance(data, DataLoader)
        and data.batch_sampler is not None
        and not isinstance(data.dataset, IterableDataset)
    ):
        indices, fetch = _chosen(data, data.batch_sampler), partial(_collated, data.dataset, data.collate_fn)
    elif _is_dataset(data):
        indices, fetch = range(len(data)), partial(_collated, data, default_collate)
    elif isinstance(data, Iterable):
        return _from_stream(data, count)
    else:
        raise TypeError(
            f"data must be a dataset, a DataLoader, a tuple of tensors or an iterable of batches, "
            f"got {type(data).__name__}"
        )
    _check_found(len(indices), count)
    drawn = torch.randperm(len(indices), generator=generator, device=generator.device)[:count].tolist()
    return (fetch([indices[place] for place in drawn[start : start + chunk]]) for start in range(0, len(drawn), chunk))


def _chosen(loader: DataLoader[Any], batches: Iterable[Iterable[int]]) -> Sequence[int]:
    """Returns the indices that the loader's own sampler may draw."""
    drawn = loader.sampler if type(batches) is BatchSampler else itertools.chain.from_iterable(batches)
    if isinstance(drawn, SubsetRandomSampler):  # iterated, it would draw from its generator, which training uses
        return list(drawn.indices)
    if isinstance(drawn, (SequentialSampler, RandomSampler, DistributedSampler)):
        # The whole dataset, also for a distributed sampler: all ranks make the same mask.
        return range(len(cast(Sized, loader.dataset)))
    with torch.random.fork_rng(devices=[]):  # a sampler may draw from the global generator, which training uses
        return sorted(set(drawn))


def _is_tensors(data: Any) -> bool:
    """Whether this is a list of tensors, or a tuple or dictionary whose leaves are all tensors."""
    if not isinstance(data, (tuple, list, dict)) or not data:
        return False
    leaves = data if isinstance(data, list) else tree_leaves(data)
    return all(isinstance(leaf, Tensor) for leaf in leaves)


def _is_dataset(data: Any) -> bool:
    """Whether this is indexable, and if a list, one of single samples such as (image, 3), not of batches."""
    if isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return False
    leaves = tree_leaves(data[:1]) if isinstance(data, (list, tuple)) else [None]
    return any(not isinstance(leaf, Tensor) or leaf.dim() == 0 for leaf in leaves)


def _equal_length(data: Any) -> int:
    lengths = [len(part) if part.dim() else 0 for part in tree_leaves(data)]
    if len(set(lengths)) != 1:
        raise ValueError(f"tensors given as data must have equal first dimensions, got {lengths}")
    return lengths[0]


def _collated(dataset: Any, collate: Callable[[list[Any]], Any], indices: list[int]) -> Any:
    if hasattr(dataset, "__getitems__"):
        return collate(dataset.__getitems__(indices))
    return collate([dataset[index] for index in indices])


def _from_stream(batches: Iterable[Any], count: int) -> Iterator[Any]:
    taken = 0
    for batch in batches:
        size = batch_size(batch)
        used = min(size, count - taken)
        yield slice_batch(batch, slice(used), size)
        taken += used
        if taken == count:
            return
    _check_found(taken, count)


def _check_found(found: int, count: int) -> None:
    if found == 0:
        raise ValueError("data is empty; at least one sample is needed")
    if found < count:
        warnings.warn(f"{count} samples were requested but data holds only {found}; using all {found}", stacklevel=3)
