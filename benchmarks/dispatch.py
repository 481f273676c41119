"""What reaches the dispatcher: operations that a GPU would launch, counted without one, and the peak of live bytes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

#: Allocations and questions about a tensor launch nothing.
_NO_LAUNCH = (
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("is_same_size", "_local_scalar_dense"),
)
#: What makes the host wait for the device, or asks for a size that only the device knows.
_SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique2", "equal")


class LaunchCounter(TorchDispatchMode):
    """Counts dispatched operations by name, without views and allocations; ``syncs`` those that wait for the device.

    A ``_foreach`` operation counts once: an accelerator handles about a hundred tensors in each of its launches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()

    @property
    def count(self) -> int:
        return self.names.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in _SYNCS:
            self.syncs[name] += 1
        if not func.is_view and name not in _NO_LAUNCH:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):
    """Within the block, ``now`` is the bytes of all storages seen and not yet freed, ``peak`` their maximum: exact, and
    the same on every machine.

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
