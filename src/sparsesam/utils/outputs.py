"""Operations of a first pass: what they read, and what they returned, for a second pass to use again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from sparsesam.utils.operators import Call, checksum, random_state, settings, storage_of


class Output:
    """A storage that an operation has made, and the tensor on it that was returned."""

    __slots__ = ("geometry", "kept", "number", "options", "reference", "seen", "shared", "storage", "tensor")

    def __init__(self, t: Tensor, number: int) -> None:
        self.number, self.storage, self.reference = number, storage_of(t), StorageWeakRef(t.untyped_storage())
        self.geometry, self.options = (t.storage_offset(), t.size(), t.stride()), (t.dtype, t.device)
        self.tensor = None if t.is_cpu else TensorWeakRef(t)
        self.kept: torch.UntypedStorage | None = None
        self.seen: int | None = None  # checksum or version
        self.shared: Tensor | None = None  # has the version counter of those who hold the memory

    def is_alive(self) -> bool:
        return not self.reference.expired()

    def is_held_elsewhere(self) -> bool:
        return torch._C._storage_Use_Count(self.storage) > 1

    def keep(self) -> None:
        self.kept = torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)

    def again(self, _: list[Tensor]) -> Tensor:
        """The tensor, on memory that nobody else holds."""
        memory: Any = self.kept.clone() if self.kept is not None and self.is_held_elsewhere() else self.kept
        self.kept = None
        return torch.empty(0, dtype=self.options[0], device=self.options[1]).set_(memory, *self.geometry)

    def watch(self) -> None:
        """Notice writes by those who hold the memory: by its bits; on a device by their version counter."""
        if self.kept is None or not self.is_held_elsewhere():
            return
        if self.tensor is None:
            self.seen = checksum(self.kept)
        elif (tensor := self.tensor()) is not None:
            self.shared, self.seen = tensor.detach(), tensor._version
        else:
            self.kept = None

    def drop_if_written(self) -> None:
        """Since ``watch``."""
        if self.kept is not None and self.seen is not None:
            if self.seen != (checksum(self.kept) if self.shared is None else self.shared._version):
                self.kept = None
            self.shared = None


class Alias:
    """An output that is one of the operation's inputs, or a view of it."""

    def __init__(self, t: Tensor, tensors: list[Tensor], index: int) -> None:
        self.index, self.is_input = index, t is tensors[index]
        self.geometry = t.size(), t.stride(), t.storage_offset()

    def again(self, tensors: list[Tensor]) -> Tensor:
        source = tensors[self.index]
        return source if self.is_input else source.as_strided(*self.geometry)


class Entry:
    """An operation of the first pass."""

    __slots__ = ("func", "inputs", "others", "outputs", "random", "returns", "settings")

    def __init__(self, call: Call, inputs: list[Any]) -> None:
        self.func, self.others, self.settings = call.func, call.others, settings()
        self.inputs = inputs  # a description, a copy with its stride, or None: not compared
        self.random: tuple[bytes, Tensor | None] = random_state(call.generator), None
        self.outputs: list[Any] = []
        self.returns: type | None = None  # None: it always runs

    def made(self) -> list[Output]:
        return [o for o in self.outputs if type(o) is Output]
