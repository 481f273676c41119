"""Support for torch.distributed: DistributedDataParallel, Join, sharded parameters, and agreement between ranks."""
