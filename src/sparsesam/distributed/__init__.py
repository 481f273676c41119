"""What ranks must agree on: gradients, masks, counters, shards. torch.distributed and nothing of our own."""

from sparsesam.distributed.agreement import all_agree, is_distributed, require_same
from sparsesam.distributed.ddp import (
    average_gradients,
    is_first_of_static_graph,
    is_joining,
    running_ddp,
    unsynchronized,
)
from sparsesam.distributed.fsdp1 import refuse_fsdp1
from sparsesam.distributed.join import StateJoinHook
from sparsesam.distributed.shards import is_sharded

__all__ = [
    "StateJoinHook",
    "all_agree",
    "average_gradients",
    "is_distributed",
    "is_first_of_static_graph",
    "is_joining",
    "is_sharded",
    "refuse_fsdp1",
    "require_same",
    "running_ddp",
    "unsynchronized",
]
