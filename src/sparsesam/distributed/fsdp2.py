"""``fully_shard`` (FSDP2)."""

from __future__ import annotations

import sys

from torch import nn


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that the next forward gathers the shards as they are now.

    FSDP2 does so by itself after a backward, unless told ``set_reshard_after_backward(False)``.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            module.reshard()
