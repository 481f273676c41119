"""Parameters of which each rank holds a part: DTensors of ``fully_shard`` (FSDP2) and of tensor parallelism."""

from __future__ import annotations

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, without importing the slow module that defines it."""
    return hasattr(tensor, "full_tensor")
