"""Calls of the first pass that the second pass need not make again.

A call whose inputs are the very same tensors, unchanged, gives the very same outputs. So a call is looked up by
its function and the identity of its inputs, and what is returned is the first pass's own output with the graph
that made it. Whatever is not found is simply computed: the memo can only change the cost.

In-place calls make a tensor a sequence of versions, of which only the last still has data. During the second
pass each remembered tensor is therefore *at* a version, which the remembered in-place calls move on; data of a
version that is gone can be passed on to remembered calls, but not looked at (`StaleValueError`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsesam.ascent.noise import NoiseState


class EngineFallbackError(RuntimeError):
    """The engine cannot go on with this pass; a closure is simply called again without it."""


class StaleValueError(EngineFallbackError):
    """The second pass wants a value of the first one that was overwritten in place since."""


class Unhashable(Exception):
    """An argument that cannot be compared, so that the call cannot be remembered."""


@dataclass
class Call:
    outputs: Any
    #: every input tensor, with its versions before and after the call
    inputs: list[tuple[Tensor, int, int]]
    #: every output tensor, with its version after the call
    made: list[tuple[Tensor, int]]
    noise_after: NoiseState | None = None


class Memo:
    def __init__(self) -> None:
        self._calls: dict[Hashable, list[Call]] = defaultdict(list)
        self._made: dict[int, Tensor] = {}
        self._at: dict[int, int] = {}
        self._asked: dict[Hashable, int] = defaultdict(int)

    def __len__(self) -> int:
        return sum(len(calls) for calls in self._calls.values())

    # ---- first pass --------------------------------------------------------------------------------------

    def add(self, key: Hashable, call: Call) -> None:
        self._calls[key].append(call)
        for tensor, version in call.made:
            self._made[id(tensor)] = tensor
            self._at[id(tensor)] = version

    def made(self, tensor: Tensor) -> bool:
        return id(tensor) in self._made

    def has_alias(self, tensor: Tensor) -> bool:
        """Whether another remembered tensor shares the memory of this one."""
        memory = tensor.untyped_storage().data_ptr()
        return tensor._is_view() or any(
            other is not tensor and other.untyped_storage().data_ptr() == memory for other in self._made.values()
        )

    # ---- second pass -------------------------------------------------------------------------------------

    def rewind(self) -> None:
        """Begin a second pass: nothing has been looked up yet."""
        self._at = {}
        self._asked = defaultdict(int)

    def find(self, key: Hashable) -> Call | None:
        """The remembered call, if its inputs are now what they were then."""
        calls = self._calls.get(key)
        turn = self._asked[key]
        if calls is None or turn >= len(calls):
            return None
        call = calls[turn]
        for tensor, before, after in call.inputs:
            if id(tensor) in self._made:
                if self._at.get(id(tensor), tensor._version) != before:
                    return None
            elif tensor._version != after:  # a buffer that the call itself moved counts as unchanged
                return None
        self._asked[key] += 1
        for tensor, _, after in call.inputs:
            if id(tensor) in self._made:
                self._at[id(tensor)] = after
        for tensor, version in call.made:
            self._at[id(tensor)] = version
        return call

    def require_fresh(self, tensors: list[Tensor]) -> None:
        """Data of remembered tensors is about to be read: it must be that of the version they are at."""
        for tensor in tensors:
            if id(tensor) in self._made and self._at.get(id(tensor), tensor._version) != tensor._version:
                raise StaleValueError(
                    "the second pass needs a value that the first pass overwrote in place, because it takes another "
                    "path through the model; make the operation out of place, or pass engine=False"
                )

    def keep_up(self, tensors: list[Tensor]) -> None:
        """After a call that was really made: in-place changes to remembered tensors are versions of their own."""
        for tensor in tensors:
            if id(tensor) in self._made:
                self._at[id(tensor)] = tensor._version


def key_of(func: Callable[..., Any], args: Any, kwargs: Any) -> Hashable:
    """Function, identity of the tensors, values of the rest, and the modes that change what a function does."""
    modes = (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_default_dtype(),
    )
    return func, modes, _key(args), _key(kwargs)


_PLAIN = (
    *(int, float, bool, complex, str, bytes, type(None), type(Ellipsis)),
    *(torch.dtype, torch.device, torch.memory_format, torch.layout),
)


def _key(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(_key(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    if isinstance(value, slice):
        return slice, _key(value.start), _key(value.stop), _key(value.step)
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, type):
        return value
    raise Unhashable


def tensors_in(*trees: Any) -> Iterator[Tensor]:
    """Tensors in tuples, lists and dictionaries, in order."""
    for tree in trees:
        if isinstance(tree, Tensor):
            yield tree
        elif isinstance(tree, tuple | list):
            yield from tensors_in(*tree)
        elif isinstance(tree, dict):
            yield from tensors_in(*tree.values())


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same arguments with changed tensors; what holds none stays the same object."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        items = [map_tensors(change, item) for item in tree]
        return tree if all(a is b for a, b in zip(items, tree, strict=True)) else tuple(items)
    if isinstance(tree, list):
        return [map_tensors(change, item) for item in tree]
    if isinstance(tree, dict):
        return {key: map_tensors(change, value) for key, value in tree.items()}
    return tree
