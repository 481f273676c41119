"""The peak of live tensor bytes, counted storage by storage: exact, and the same on every machine."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Within the block, ``now`` is the bytes of all storages seen and not yet freed, ``peak`` their maximum.

    Storages of ``known`` tensors (the model, the batch) are not counted. What a kernel allocates and frees by
    itself, below the dispatcher, is not seen.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        # A storage keeps its Python object, hence its id, for as long as any tensor uses it.
        self._seen = {id(tensor.untyped_storage()) for tensor in known}

    def restart(self) -> None:
        """Forget the peak so far; what is alive stays counted."""
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation; count the storages it made, and those it was given that no operation made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter((result, args, kwargs)):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._seen:
            return
        self._seen.add(id(storage))
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, id(storage), storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size
