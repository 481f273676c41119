"""The second forward of a step, without the work that the first has done.

Below autograd, an operation of the second forward that has the same overload and the same inputs as in the first
returns its output of the first, if that is still alive and nobody wrote to it; everything else runs. Python code, hooks
and autograd run as always, and every value in anybody's hands is right at every moment, so nothing has to be known about
modules.

**Memory, not tensors.** A tensor is a storage and a geometry. A storage was made by an operation on the tape, or comes
from outside. Made storages are known by their number on the tape: what is in them follows from the operations before.
On the tape are operations that make storages or write to made ones, and nothing else. Views always run.

**Inputs from outside** are compared by their bits in host memory; ``nn.Parameter`` objects and device memory by storage,
geometry, version and the writes that were seen. Memory that was given away (``numpy()``, ``data_ptr()``) and memory that
no operation has filled yet (``empty``, ``zeros``) count as outside, because somebody else may fill them.

**The tape ends** at the first operation that reads a perturbed weight: the frontier. It also ends at operations outside
of aten and prims (collectives, custom and higher-order operators), in function transforms, and at tensors that are not
plain: subclasses, sparse, quantized, nested, inference.

**Reuse** needs an output that is alive at the end of the tape and that nobody writes to afterwards: not the loss, not
the first backward, not the user's code between the passes. Memory that somebody still holds is copied before it is
handed out. Random operations need the generator state that they had, and leave the state that they left. Views,
operations that write, and operations that make memory to be filled always run.

What cannot be seen: kernels outside of the dispatcher that write to memory which an operation has filled; operations of
other threads; weights written through memory that was given away before the step; how long an object lives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _storage_address as storage_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode,
    _push_mode,
)
from torch.utils.weak import TensorWeakRef

from sparsesam.utils import operators
from sparsesam.utils.operators import Kind

_GIVES_AWAY_MEMORY = {
    *(Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.__cuda_array_interface__.__get__),
    *(Tensor.untyped_storage, Tensor.storage, Tensor.share_memory_, Tensor.data.__set__),
    *(Tensor.__dlpack__, torch.utils.dlpack.to_dlpack, Tensor.apply_, Tensor.map_, Tensor.map2_),
}


def _unintercepted(function: Any) -> Any:
    """A function of autograd as it is without function modes: the mode must stay active for the hooks that it runs."""
    own = FunctionType(function.__code__, {**function.__globals__, "has_torch_function": lambda _: False})
    own.__defaults__, own.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return own


_backward, _grad = _unintercepted(torch.autograd.backward), _unintercepted(torch.autograd.grad)


def _tensor_backward(t: Tensor, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
    _backward(t, gradient, *args, **kwargs)


_RUNS_HOOKS = {torch.autograd.backward: _backward, torch.autograd.grad: _grad, Tensor.backward: _tensor_backward}


class _Output:
    """A storage that an operation of the first pass has made, and the tensor on it that was returned."""

    __slots__ = ("checksum", "geometry", "kept", "number", "options", "reference", "shared", "storage", "tensor")

    def __init__(self, t: Tensor, number: int) -> None:
        self.number, self.storage, self.reference = number, storage_of(t), StorageWeakRef(t.untyped_storage())
        self.geometry, self.options = (t.storage_offset(), t.size(), t.stride()), (t.dtype, t.device)
        self.tensor = None if t.is_cpu else TensorWeakRef(t)
        self.kept: torch.UntypedStorage | None = None
        self.checksum: int | None = None
        self.shared: Tensor | None = None  # has the version counter of those who hold the memory

    def is_held_elsewhere(self) -> bool:
        return torch._C._storage_Use_Count(self.storage) > 1

    def is_alive(self) -> bool:
        return not self.reference.expired()

    def keep(self) -> None:
        self.kept = torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)

    def hand_out(self) -> Tensor:
        memory = self.kept.clone() if self.is_held_elsewhere() else self.kept  # type: ignore[union-attr]
        self.kept = None
        return torch.empty(0, dtype=self.options[0], device=self.options[1]).set_(memory, *self.geometry)

    def take_checksum(self) -> None:
        """So that writes by those who hold the memory are noticed: by its bits; on a device by their version counter."""
        if self.kept is None or not self.is_held_elsewhere():
            return
        if self.tensor is None:
            self.checksum = operators.checksum(self.kept)
        elif (tensor := self.tensor()) is not None:
            self.shared, self.checksum = tensor.detach(), tensor._version
        else:
            self.kept = None

    def compare_checksum(self) -> None:
        if self.kept is not None and self.checksum is not None:
            if self.checksum != (operators.checksum(self.kept) if self.shared is None else self.shared._version):
                self.kept = None
            self.shared = None


def _is_plain(t: Tensor) -> bool:
    return type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and not t.is_nested and not t.is_quantized


def _geometry(t: Tensor) -> tuple[Any, ...]:
    return t.size(), t.stride(), t.storage_offset()


class _Alias(NamedTuple):
    """An output of a compiled region that is one of its inputs, or a view of it."""

    index: int
    is_input: bool
    geometry: tuple[Any, ...]

    def of(self, call: _Call) -> Tensor:
        source = call.tensors[self.index]
        return source if self.is_input else source.as_strided(*self.geometry)


class _Call(NamedTuple):
    """An operation that is about to run."""

    kind: Kind
    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: list[Tensor]
    storages: list[int]
    others: list[Any]
    generator: torch.Generator | None

    def run(self, tape: Tape) -> tuple[Any, Sequence[Any]]:
        tape.count_writes(self.kind, self.args, self.kwargs)
        out = self.func(*self.args, **self.kwargs)
        return out, out if isinstance(out, (tuple, list)) else (out,)

    def is_compiled(self) -> bool:
        return operators.region_of(self.func, self.args) is not None

    def statistics(self) -> list[int]:
        return [id(t) for t in operators.running_statistics(self.kind, self.args)]


class _Entry:
    """An operation of the first pass."""

    __slots__ = ("func", "inputs", "others", "outputs", "random", "returns", "settings")

    def __init__(self, call: _Call, inputs: list[Any]) -> None:
        self.func, self.others, self.settings = call.func, call.others, operators.settings()
        self.inputs = inputs  # a description, a copy with its stride, or None: not compared
        self.random: tuple[bytes, Tensor | None] = operators.random_state(call.generator), None
        self.outputs: list[Any] = []
        self.returns: type | None = None  # None: it always runs

    def made(self) -> list[_Output]:
        return [o for o in self.outputs if type(o) is _Output]


class _Watch(TorchFunctionMode):
    """Sees what is not an operation: memory that is given away, and function transforms."""

    def __init__(self, mode: _Mode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, mode = kwargs or {}, self.mode
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        if mode.is_idle:
            return mode.step_aside(func, args, kwargs)
        if func in _GIVES_AWAY_MEMORY:
            mode.tape.given_away.update(
                storage_of(t) for t in args if isinstance(t, Tensor) and t.layout is torch.strided and not t.is_nested
            )
        elif torch._C._functorch.peek_interpreter_stack() is not None:
            mode.end("a function transform")
        elif func in _RUNS_HOOKS:
            with self:
                return _RUNS_HOOKS[func](*args, **kwargs)
        return func(*args, **kwargs)


class _Mode(TorchDispatchMode):
    """What both passes have in common: which operations are on the tape, and what they read."""

    supports_higher_order_operators = True

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self.made: dict[int, int] = {}  # storages of this pass, and their numbers on the tape
        self.blank: set[int] = set()  # those that no operation has filled
        self.has_started = tape.start is None
        self.is_over = False  # operations are no longer recorded or compared
        self.is_idle = False  # nor are writes counted

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def step_aside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function without this mode: an operation costs less then."""
        if _get_current_dispatch_mode() is not self:
            return func(*args, **kwargs)
        _pop_mode()
        try:
            return func(*args, **kwargs)
        finally:
            _push_mode(self)

    def end(self, why: str) -> None:
        raise NotImplementedError

    def perform(self, call: _Call) -> Any:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_idle:
            return func(*args, **kwargs)
        kind = operators.kind_of(func, operators.region_of(func, args))
        if self.has_started and not self.is_over:
            if kind.is_view:
                if args and type(args[0]) is nn.Parameter:
                    self.tape.know(storage_of(args[0]), args[0])
                return func(*args, **kwargs)
            call = self.read(kind, func, args, kwargs)
            if call is not None:
                return self.perform(call)
        self.tape.count_writes(kind, args, kwargs)
        return func(*args, **kwargs)

    def read(self, kind: Kind, func: Any, args: Any, kwargs: Any) -> _Call | None:
        """None: the operation is not on the tape, because it ends it, or neither makes memory nor writes to any on it."""
        if not kind.is_plain:
            return self.end(f"{func} is not a plain operation of aten or prims")
        tensors, others = operators.split(args, kwargs)
        storages = []
        for t in tensors:
            if not _is_plain(t):
                return self.end(f"{func} reads a tensor that is not plain")
            storage = storage_of(t)
            storages.append(storage)
            if storage not in self.made:
                if storage in self.tape.moved:
                    return self.end(f"{func} reads {self.tape.moved[storage]}, which is perturbed")
                if t.is_inference() or t._is_zerotensor():
                    return self.end(f"{func} reads a tensor that is not plain")
                if type(t) is nn.Parameter:
                    self.tape.know(storage, t)
        is_recorded = kind.makes
        for t in operators.written_by(kind, args, kwargs) if kind.written else ():
            storage = storage_of(t)
            is_filled = kind.is_seeded and t.numel() * t.element_size() == t.untyped_storage().nbytes()
            if is_filled or not t.is_cpu:
                self.blank.discard(storage)
            is_recorded |= storage in self.made and storage not in self.blank
        generator = operators.generator_of(tensors, others) if kind.is_seeded else None
        return _Call(kind, func, args, kwargs, tensors, storages, others, generator) if is_recorded else None

    def describe(self, t: Tensor, storage: int) -> tuple[Any, ...] | None:
        """Equal descriptions are equal values. None: the values themselves must be compared."""
        tape = self.tape
        geometry = (t.size(), t.stride(), t.storage_offset(), t.dtype, t.is_conj(), t.is_neg())
        is_loose = storage in tape.given_away or storage in self.blank
        if storage in self.made and not is_loose:
            return self.made[storage], geometry
        if t.is_cpu and (is_loose or storage not in tape.versioned):
            return None
        if is_loose:
            return (object(),)  # device memory that others may have filled: equal to nothing
        tape.know(storage, t)
        return storage, geometry, t._version, tape.writes.get(storage, 0)

    def adopt(self, call: _Call, t: Tensor, number: int) -> None:
        """The storage of t gets its number."""
        storage = storage_of(t)
        self.made[storage] = number
        self.tape.writes.pop(storage, None)  # another storage had this address
        self.tape.given_away.discard(storage)
        if call.kind.is_empty or (call.kind.is_blank and t.is_cpu):
            self.blank.add(storage)


class _Record(_Mode):
    def end(self, why: str) -> None:
        if not self.is_over:
            tape, self.is_over, self.tape.ended = self.tape, True, why
            for entry in tape.entries:
                made = entry.made()
                if entry.returns is None or any(map(tape.is_spoilt, made)) or not all(o.is_alive() for o in made):
                    entry.returns = None
                else:
                    for output in made:
                        output.keep()
            self.is_idle = all(entry.returns is None for entry in tape.entries)

    def perform(self, call: _Call) -> Any:
        tape, updated = self.tape, call.statistics()
        inputs = [
            None if id(t) in updated else self.describe(t, storage) or (t.stride(), t.detach().clone())
            for t, storage in zip(call.tensors, call.storages, strict=True)
        ]
        entry = _Entry(call, inputs)
        out, values = call.run(tape)
        if call.generator is not None:
            entry.random = entry.random[0], call.generator.get_state()
        can_reuse = not (call.kind.written or call.kind.is_blank or (updated and not call.tensors[0].is_cpu))
        for value in values:
            if not isinstance(value, Tensor):
                entry.outputs.append(value)
                can_reuse &= not isinstance(value, (tuple, list))
            elif _is_plain(value) and storage_of(value) in call.storages:
                index = call.storages.index(storage_of(value))
                entry.outputs.append(_Alias(index, value is call.tensors[index], _geometry(value)))
                can_reuse &= call.is_compiled() and value.dtype == call.tensors[index].dtype
            elif _is_plain(value) and type(value) is Tensor and storage_of(value) not in self.made:
                entry.outputs.append(_Output(value, tape.numbers))
                self.adopt(call, value, tape.numbers)
                tape.numbers += 1
            elif _is_plain(value):
                entry.outputs.append(None)
                can_reuse = False
            else:
                return self.end(f"{call.func} returns a tensor that is not plain") or out
        entry.returns = type(out) if can_reuse else None
        tape.entries.append(entry)
        return out


class _Replay(_Mode):
    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        self.position = 0
        self.references: list[StorageWeakRef] = []  # so that no other storage gets an address that is in `made`
        self.is_over = self.is_idle = not tape.entries

    def end(self, why: str) -> None:
        if not self.is_over:
            self.is_over = self.is_idle = True
            if self.position < len(self.tape.entries):
                self.tape.ended = why
            self.tape.entries.clear()

    def perform(self, call: _Call) -> Any:
        tape = self.tape
        entry = tape.entries[self.position] if self.position < len(tape.entries) else None
        if entry is None or (why := self.difference(entry, call)):
            self.end("" if entry is None else f"{call.func} has {why}")
            return call.func(*call.args, **call.kwargs)
        self.position += 1
        made = entry.made()
        if entry.returns is None or any(o.kept is None or tape.is_spoilt(o) for o in made):
            out, values = call.run(tape)
        else:
            values = [
                o.hand_out() if type(o) is _Output else o.of(call) if type(o) is _Alias else o for o in entry.outputs
            ]
            out = values[0] if issubclass(entry.returns, Tensor) else entry.returns(values)
            tape.reused += 1
            if call.generator is not None:
                call.generator.set_state(entry.random[1])  # type: ignore[arg-type]
            if call.statistics():
                tape.count_writes(call.kind, call.args, call.kwargs)
                torch.ops.aten.batch_norm_update_stats(call.args[0], call.args[3], call.args[4], call.args[6])
        for value, output in zip(values, entry.outputs, strict=True):
            if type(output) is _Output:
                output.kept = None
                self.adopt(call, value, output.number)
                self.references.append(StorageWeakRef(value.untyped_storage()))
        return out

    def difference(self, entry: _Entry, call: _Call) -> str:
        if entry.func is not call.func:
            return f"taken the place of {entry.func}"
        if len(entry.inputs) != len(call.tensors) or not operators.same(entry.others, call.others):
            return "other arguments"
        if entry.settings != operators.settings() or entry.random[0] != operators.random_state(call.generator):
            return "another random state, or other settings of torch"
        for recorded, t, storage in zip(entry.inputs, call.tensors, call.storages, strict=True):
            if recorded is None:
                continue
            if isinstance(recorded[-1], Tensor):
                if recorded[0] != t.stride() or not operators.same_bits(recorded[1], t):
                    return "another input"
            elif recorded != self.describe(t, storage):
                return "another input"
        return ""


class Tape:
    """The operations of a first forward, and their outputs that the second forward may use again.

    Args:
        moved: the weights that will be perturbed, by name.
        start: the inner model of a DDP, in whose forward the tape begins: what DDP does before is not on it.
        between: whether the caller's code runs between ``recording()`` and ``replaying()``. There, writes to memory that
            others hold, and to weights, are noticed by checksums; on a device, by version counters.

    Attributes:
        operations: operations of the first forward, until the tape ended, that make or write memory.
        reused: those of them that were not computed again in the second.
        ended: where and why reuse ended, with the weight's or the operation's name.
    """

    def __init__(self, moved: Mapping[str, Tensor], *, start: nn.Module | None = None, between: bool = True) -> None:
        self.moved = {storage_of(t): name for name, t in moved.items()}
        self.start, self.between = start, between
        self.operations, self.reused, self.ended = 0, 0, ""
        self.numbers = 0  # of storages made in the first pass
        self.entries: list[_Entry] = []
        self.writes: dict[int, int] = {}
        self.given_away: set[int] = set()
        self.versioned: dict[int, Tensor] = {}  # outside memory that is known by its version
        self.checksums: dict[int, int] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the first forward and the first backward: writes are counted until it ends."""
        mode = _Record(self)
        try:
            with self._active(mode):
                yield
        except BaseException:
            self.release()
            raise
        mode.end("the first pass is over")
        self.operations = len(self.entries)
        if mode.is_idle:
            self.release()
        elif self.between:
            for output in self._outputs():
                output.take_checksum()
            self.checksums = {s: operators.checksum(t.untyped_storage()) for s, t in self.versioned.items() if t.is_cpu}

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Around the second forward and backward."""
        for output in self._outputs():
            output.compare_checksum()
        for storage, checksum in self.checksums.items():
            if operators.checksum(self.versioned[storage].untyped_storage()) != checksum:
                self.given_away.add(storage)
        try:
            with self._active(_Replay(self)):
                yield
        finally:
            self.release()

    def release(self) -> None:
        """Drops everything that is kept."""
        for held in (self.entries, self.writes, self.given_away, self.versioned, self.checksums):
            held.clear()

    @contextmanager
    def _active(self, mode: _Mode) -> Iterator[None]:
        with ExitStack() as stack:
            if self.start is not None:
                begin = lambda *_: setattr(mode, "has_started", True)  # noqa: E731
                stack.enter_context(self.start.register_forward_pre_hook(begin, prepend=True))
            if not mode.is_idle:
                stack.enter_context(_Watch(mode))
                stack.enter_context(mode)
            yield

    def _outputs(self) -> list[_Output]:
        return [output for entry in self.entries for output in entry.made()]

    def know(self, storage: int, t: Tensor) -> None:
        if storage not in self.versioned and storage not in self.moved:
            self.versioned[storage] = t.detach()

    def count_writes(self, kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for t in operators.written_by(kind, args, kwargs) if kind.written or kind.is_batch_norm else ():
            if t.layout is torch.strided and not t.is_nested:
                self.writes[storage_of(t)] = self.writes.get(storage_of(t), 0) + 1

    def is_spoilt(self, output: _Output) -> bool:
        return output.storage in self.writes or output.storage in self.given_away
