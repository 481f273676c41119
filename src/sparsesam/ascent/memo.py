"""Calls of the first pass that the second pass need not make again.

A call whose inputs are the very same tensors, unchanged, gives the very same outputs. So a call is looked up by
its function and the identity of its inputs, and what is returned is the first pass's own output with the graph
that made it. Whatever is not found is simply computed: the memo can only change the cost.

A value that goes only into remembered calls is never looked at again. A *light* memo therefore keeps none of its
own accord: what neither the graph nor the model holds when the forward ends is freed, and the second pass gets a
stand-in of its shape, which remembered calls take for it. Tensors are told apart by numbers, because an identity is
free once its tensor is.

In-place calls make a tensor a sequence of versions, of which only the last still has data. During the second
pass each remembered tensor is therefore *at* a version, which the remembered in-place calls move on. Data of a
version that is gone can be passed on to remembered calls, but not looked at (`StaleValueError`).
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsesam.ascent.noise import Noise, NoiseState, same_state
from sparsesam.ascent.stand_in import StandIn

PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_NUMBER = "_sparsesam_number"
_numbers = itertools.count()


class EngineFallbackError(RuntimeError):
    """The engine cannot go on with this pass; a closure is simply called again without it."""

    made = 0  # counted, because a model may catch the error and go on

    def __init__(self, *reasons: str) -> None:
        super().__init__(*reasons)
        EngineFallbackError.made += 1


class StaleValueError(EngineFallbackError):
    """The second pass wants a value of the first one that was overwritten in place since."""


class Unhashable(Exception):
    """An argument that cannot be compared, so that the call cannot be remembered."""


class Input(NamedTuple):
    """An input of a call with its versions before and after: a tensor that is there anyway, or the number of one."""

    tensor: Tensor | int
    before: int
    after: int


class Made(NamedTuple):
    """A tensor that a call made, and its version after the call."""

    number: int
    version: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def stand_in(self) -> Tensor:
        room = StandIn.like(self.shape, self.dtype, self.device, self.requires_grad)
        setattr(room, _NUMBER, self.number)
        return room


@dataclass
class Call:
    outputs: Any  # with a `Made` in the place of each tensor that is not held
    inputs: list[Input]
    made: list[Made]
    noise: tuple[NoiseState, NoiseState] | None  # before and after, if the call drew random numbers


class Memo:
    def __init__(self, *, light: bool = False) -> None:
        self.light = light
        self._calls: dict[Hashable, list[Call]] = defaultdict(list)
        self._made: dict[int, weakref.ref[Tensor]] = {}
        self._held: list[Tensor] = []
        self._stand_ins: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._refusals = 0
        self._at: dict[int, int] = {}
        self._asked: dict[Hashable, int] = defaultdict(int)

    def __len__(self) -> int:
        return sum(len(calls) for calls in self._calls.values())

    def made(self, tensor: Tensor) -> bool:
        """Whether a remembered call made this tensor, or it stands in for one that a call made."""
        number = getattr(tensor, _NUMBER, None)
        return number is not None and (self._tensor(number) is tensor or self._stand_ins.get(number) is tensor)

    def key_of(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Hashable:
        """Function, identity of the tensors, values of the rest, and the modes that change what a function does."""
        modes = (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
            torch.get_default_dtype(),
        )
        return func, modes, _key(args, self._tensor_key), _key(kwargs, self._tensor_key)

    def _tensor_key(self, tensor: Tensor) -> Hashable:
        return ("made", getattr(tensor, _NUMBER)) if self.made(tensor) else id(tensor)

    def _tensor(self, number: int) -> Tensor | None:
        reference = self._made.get(number)
        return None if reference is None else reference()

    # ---- first pass --------------------------------------------------------------------------------------

    def add(
        self,
        key: Hashable,
        result: Any,
        inputs: list[tuple[Tensor, int, int]],
        noise: tuple[NoiseState, NoiseState] | None,
        is_there_anyway: Callable[[Tensor], bool],
    ) -> None:
        """Remember a call; of the tensors in its result, those that are there anyway are not its own."""
        for tensor, _, after in inputs:
            if self.made(tensor):
                self._at[getattr(tensor, _NUMBER)] = after
        own = {id(tensor): self._describe(tensor) for tensor in tensors_in(result) if not is_there_anyway(tensor)}
        # Structures of other kinds (torch.max's pair) could not be made again from parts.
        plain = isinstance(result, Tensor) or type(result) in (tuple, list)
        if not (self.light and plain and all(map(_is_common, tensors_in(result)))):
            self._held += [tensor for tensor in tensors_in(result) if id(tensor) in own]
        outputs = map_tensors(lambda tensor: own.get(id(tensor), tensor), result) if plain else result
        noted = [Input(getattr(t, _NUMBER) if self.made(t) else t, before, after) for t, before, after in inputs]
        self._calls[key].append(Call(outputs, noted, list(own.values()), noise))

    def _describe(self, tensor: Tensor) -> Made:
        if not self.made(tensor):  # a copy of a tensor may carry the number of the original
            number = next(_numbers)
            setattr(tensor, _NUMBER, number)
            self._made[number] = weakref.ref(tensor)
        number = getattr(tensor, _NUMBER)
        self._at[number] = tensor._version
        return Made(number, tensor._version, tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)

    def hold(self, tensor: Tensor) -> None:
        """The second pass will look at this value."""
        if self.made(tensor):
            self._held.append(tensor)

    def settle(self) -> None:
        """The forward is over: what is alive now, somebody may look at later."""
        self._held += [tensor for reference in self._made.values() if (tensor := reference()) is not None]

    def has_alias(self, tensor: Tensor) -> bool:
        """Whether another remembered tensor shares the memory of this one."""
        memory = memory_of(tensor)
        others = (reference() for reference in self._made.values())
        return tensor._is_view() or any(
            other is not None and other is not tensor and memory_of(other) == memory for other in others
        )

    def is_as_left(self) -> bool:
        """Whether nobody wrote to a remembered tensor since its last remembered call, or to its attributes."""
        return all(
            tensor._version == self._at.get(number) and all(key.startswith("_sparsesam") for key in vars(tensor))
            for number, reference in self._made.items()
            if (tensor := reference()) is not None
        )

    # ---- second pass -------------------------------------------------------------------------------------

    def rewind(self) -> None:
        """Begin a second pass: nothing has been looked up yet."""
        self._at = {}
        self._stand_ins = weakref.WeakValueDictionary()
        self._refusals = StandIn.refusals
        self._asked = defaultdict(int)

    def find(self, key: Hashable, noise: Noise) -> Call | None:
        """The remembered call, if its inputs and the random numbers to come are now what they were then."""
        calls = self._calls.get(key)
        turn = self._asked[key]
        if calls is None or turn >= len(calls):
            return None
        call = calls[turn]
        if call.noise is not None and not same_state(noise.read(), call.noise[0]):
            return None
        for tensor, before, after in call.inputs:
            if isinstance(tensor, int):
                if self._version(tensor) != before:
                    return None
            elif tensor._version != after:  # a buffer that the call itself moved counts as unchanged
                return None
        self._asked[key] += 1
        for tensor, _, after in call.inputs:
            if isinstance(tensor, int):
                self._at[tensor] = after
        for made in call.made:
            self._at[made.number] = made.version
        return call

    def outputs(self, call: Call) -> Any:
        """What the call returned in the first pass, stand-ins for what is gone."""
        return _map_leaves(self._revived, call.outputs)

    def _revived(self, leaf: Any) -> Any:
        if not isinstance(leaf, Made):
            return leaf
        tensor = self._tensor(leaf.number)
        if tensor is not None:
            return tensor
        stand_in = self._stand_ins.get(leaf.number)
        if stand_in is None:
            stand_in = self._stand_ins[leaf.number] = leaf.stand_in()
        return stand_in

    def release(self) -> None:
        """The last forward of the second pass is over: its backward may free what it comes past."""
        self._held = []

    def missed_a_value(self) -> bool:
        """Whether a stand-in was looked at, or is still in somebody's hands after the pass."""
        return StandIn.refusals > self._refusals or len(self._stand_ins) > 0

    def _version(self, number: int) -> int | None:
        tensor = self._tensor(number)
        return self._at.get(number, None if tensor is None else tensor._version)

    def require_fresh(self, tensors: list[Tensor]) -> None:
        """Data of remembered tensors is about to be read: it must be that of the version they are at."""
        for tensor in tensors:
            if self.made(tensor) and self._version(getattr(tensor, _NUMBER)) != tensor._version:
                raise StaleValueError(
                    "the second pass needs a value that the first pass overwrote in place, because it takes another "
                    "path through the model; make the operation out of place, or pass engine=False"
                )

    def keep_up(self, tensors: list[Tensor]) -> None:
        """After a call that was really made: in-place changes to remembered tensors are versions of their own."""
        for tensor in tensors:
            if self.made(tensor):
                self._at[getattr(tensor, _NUMBER)] = tensor._version


_PLAIN = (
    *(int, float, bool, complex, str, bytes, type(None), type(Ellipsis)),
    *(torch.dtype, torch.device, torch.memory_format, torch.layout),
)


def _key(value: Any, tensor_key: Callable[[Tensor], Hashable]) -> Hashable:
    if isinstance(value, Tensor):
        return tensor_key(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(_key(item, tensor_key) for item in value)
    if isinstance(value, dict):
        return tuple((name, _key(item, tensor_key)) for name, item in value.items())
    if isinstance(value, slice):
        return slice, *(_key(part, tensor_key) for part in (value.start, value.stop, value.step))
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, type):
        return value
    raise Unhashable


def memory_of(tensor: Tensor) -> int | None:
    """Where its values are; None if that cannot be said (sparse, nested, quantized, sharded, empty)."""
    if type(tensor) not in PLAIN_TENSORS or not _is_common(tensor) or tensor.numel() == 0:
        return None
    return tensor.untyped_storage().data_ptr()


def _is_common(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def tensors_in(*trees: Any) -> Iterator[Tensor]:
    """Tensors in tuples, lists and dictionaries, in order."""
    for tree in trees:
        if isinstance(tree, Tensor):
            yield tree
        elif isinstance(tree, tuple | list):
            yield from tensors_in(*tree)
        elif isinstance(tree, dict):
            yield from tensors_in(*tree.values())


def map_tensors(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same arguments with changed tensors; what holds none stays the same object."""
    return _map_leaves(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def _map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, tuple) and not isinstance(tree, Made):
        items = [_map_leaves(change, item) for item in tree]
        return tree if all(a is b for a, b in zip(items, tree, strict=True)) else tuple(items)
    if isinstance(tree, list):
        return [_map_leaves(change, item) for item in tree]
    if isinstance(tree, dict):
        return {key: _map_leaves(change, value) for key, value in tree.items()}
    return change(tree)
