"""Support for torch.distributed: DistributedDataParallel, sharded parameters, and agreement between ranks."""
