"""Support for torch.distributed: DistributedDataParallel, Join, sharded parameters, and agreement between ranks."""

from sparsesam.distributed.agreement import all_agree, is_distributed
from sparsesam.distributed.ddp import (
    average_gradients,
    invalidates_graphs,
    is_first_of_static_graph,
    running_ddp,
    unsynchronized,
    unwrap,
)
from sparsesam.distributed.join import JoinableOptimizer
from sparsesam.distributed.shards import Shards, as_shard_of, is_sharded, local_part, refuse_fsdp1, reshard

__all__ = [
    "JoinableOptimizer",
    "Shards",
    "all_agree",
    "as_shard_of",
    "average_gradients",
    "invalidates_graphs",
    "is_distributed",
    "is_first_of_static_graph",
    "is_sharded",
    "local_part",
    "refuse_fsdp1",
    "reshard",
    "running_ddp",
    "unsynchronized",
    "unwrap",
]
