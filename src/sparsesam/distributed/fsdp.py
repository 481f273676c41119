"""``fully_shard`` (FSDP2), and FullyShardedDataParallel (FSDP1), which is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import Tensor, nn


def reshard(model: nn.Module) -> None:
    """Free parameters that FSDP2 gathered, so that the next forward gathers the shards as they are now.

    It does so by itself after a backward, unless told ``set_reshard_after_backward(False)``.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            module.reshard()


def refuse_fsdp1(parameters: Iterable[Tensor]) -> None:
    """Raise for parameters that FSDP1 flattened: each rank would take the norm of its own shard for the whole."""
    if any(getattr(parameter, "_fsdp_flattened", False) for parameter in parameters):
        raise TypeError(
            "model must not be wrapped in FullyShardedDataParallel (FSDP1): its flat shards look like whole tensors, "
            "and each rank would divide by the norm of its own part; use torch.distributed.fsdp.fully_shard (FSDP2) "
            "or DistributedDataParallel"
        )
