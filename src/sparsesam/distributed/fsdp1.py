"""FullyShardedDataParallel, the first: refused, because its shards cannot be told from whole tensors."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def refuse_fsdp1(parameters: Iterable[Tensor]) -> None:
    """Raise for parameters that FSDP1 flattened: each rank would take the norm of its own shard for the whole."""
    if any(getattr(parameter, "_fsdp_flattened", False) for parameter in parameters):
        raise TypeError(
            "model must not be wrapped in FullyShardedDataParallel (FSDP1): its flat shards look like whole tensors, "
            "and each rank would divide by the norm of its own part; use torch.distributed.fsdp.fully_shard (FSDP2) "
            "or DistributedDataParallel"
        )
