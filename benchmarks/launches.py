"""Counting the operations that reach a device: what a GPU would launch, counted without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

#: Allocations and questions about a tensor launch nothing.
_NO_LAUNCH = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "is_same_size",
    "_local_scalar_dense",
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

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in _SYNCS:
            self.syncs[name] += 1
        if not func.is_view and name not in _NO_LAUNCH:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))
