"""Counts at the dispatcher: operations that a GPU would launch, without needing one, and the peak of live bytes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_READ = "_local_scalar_dense"
#: Allocations and metadata queries launch nothing.
_NO_LAUNCH = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "is_same_size", _READ)
#: Operations that make the host wait for the device, or whose output size only the device knows.
_SYNCS = (_READ, "nonzero", "masked_select", "is_nonzero", "unique2", "equal")


class LaunchCounter(TorchDispatchMode):
    """``names`` counts the dispatched operations, without views and allocations; ``syncs`` is the number that wait.

    A ``_foreach`` operation counts once: an accelerator handles about a hundred tensors per launch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.syncs = 0

    @property
    def count(self) -> int:
        return self.names.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.syncs += name in _SYNCS
        if not func.is_view and name not in _NO_LAUNCH:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):
    """Within the block, ``now`` is the bytes of all storages seen and not yet freed, ``peak`` their maximum: exact, and
    the same on every machine.

    Storages of ``known`` tensors (the model, the batch) are not counted, nor is memory that a kernel allocates and
    frees internally, below the dispatcher.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        # A storage keeps its Python object, and so its id, as long as any tensor uses it.
        self._seen = {id(tensor.untyped_storage()) for tensor in known}

    def restart(self) -> None:
        """Reset the peak to the bytes alive now."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; count the storages it created and those of its arguments not seen before."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter((result, args, kwargs)):
            if isinstance(leaf, Tensor) and id(storage := leaf.untyped_storage()) not in self._seen:
                self._seen.add(id(storage))
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, id(storage), storage.nbytes())
        return result

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size
