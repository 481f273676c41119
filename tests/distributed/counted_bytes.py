"""Counts the bytes that a rank passes to collectives."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountedBytes(TorchDispatchMode):
    """Sums up the tensors of every collective within the block, including those that DDP's reducer starts."""

    def __init__(self):
        super().__init__()
        self.bytes = self.collectives = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.collectives += 1
            self.bytes += sum(t.numel() * t.element_size() for t in tree_leaves(args[0]) if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))
