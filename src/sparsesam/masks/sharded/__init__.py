"""Masks of weights that are spread over ranks: the masks of one process, without gathering scores or weights."""

from sparsesam.masks.sharded.fisher import gathered_batches, sharded_fisher
from sparsesam.masks.sharded.patterns import on_shards

__all__ = ["gathered_batches", "on_shards", "sharded_fisher"]
