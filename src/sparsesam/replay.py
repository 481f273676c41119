"""The second forward of a step, without the work that the first has done.

Below autograd, an operation of the second forward that has the same overload and the same inputs as in the first returns
its output of the first, if that is still alive and nobody wrote to it; everything else runs. Python code, hooks and autograd
run as always, and every value in anybody's hands is right at every moment, so nothing has to be known about modules.

    tape = Tape({name: weight}, start=None)
    with tape.recording():                      # until an operation reads one of these weights: the frontier
        loss = f()
        torch.autograd.backward(loss, inputs=[weight])
    del loss
    ...                                         # the weights move
    with tape.replaying():
        f().backward()
    tape.release()

**Memory, not tensors.** A tensor is a storage and a geometry. A storage was made by an operation on the tape, or comes from
outside. Made storages are known by their number on the tape: what is in them follows from the operations before. On the tape
are operations that make storages or write to made ones, nothing else. Views only make geometry, and always run.

**Inputs from outside** are compared by their bits in host memory; ``nn.Parameter`` objects and device memory by storage,
geometry, version and the number of writes that were seen. Memory that was given away (``numpy()``, ``data_ptr()``, ...) and
memory that no operation has filled (``empty``, ``zeros``) count as outside: somebody else may fill them.

**Reuse** needs an output that is alive at the frontier and was not written since, by the loss, by the first backward, or by
the user's code between the passes. Memory that somebody still holds is copied before it is handed out.

Random operations are compared by their generator's state and leave the state that they left in the first pass. The tape ends
at an operation that is not of aten or prims (collectives, custom and higher-order operators; compiled regions are
operations), function transforms, and tensors that are not plain: subclasses, sparse, quantized, nested, inference.

What cannot be seen: kernels outside of the dispatcher that write to memory an operation has filled; other threads; weights
written through memory that was given away before the step; code that depends on how long an object lives.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _storage_address as storage_of
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.weak import TensorWeakRef

_aten = torch.ops.aten
_EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
_CONSTANT = {
    f"aten::{prefix}{name}{suffix}"
    for name in ("zeros", "ones", "full")
    for prefix, suffix in (("", ""), ("", "_like"), ("new_", ""))
}
_EXCHANGES_MEMORY = {
    "aten::set_",
    "aten::resize_",
    "aten::resize_as_",
    "aten::_resize_output_",
    "aten::_efficientzerotensor",
}
_GIVES_AWAY_MEMORY = {
    Tensor.numpy,
    Tensor.__array__,
    Tensor.data_ptr,
    Tensor.untyped_storage,
    Tensor.storage,
    Tensor.__dlpack__,
    torch.utils.dlpack.to_dlpack,
    Tensor.apply_,
    Tensor.map_,
    Tensor.map2_,
    Tensor.share_memory_,
    Tensor.__cuda_array_interface__.__get__,
    Tensor.data.__set__,
}
# Updates the running statistics, its arguments 3 and 4, if argument 5 is true; its schema does not say so.
_BATCH_NORMS = {_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default}


class _Kind(NamedTuple):
    """What is the same in every call of an overload."""

    ends: bool  # cannot be on a tape
    passes: bool  # touches no memory, such as a view
    written: tuple[tuple[int, str], ...]  # arguments that are written
    makes: bool  # returns new tensors
    seeded: bool
    blank: str  # "empty" or "constant": memory that is made to be filled
    normalizes: bool


@cache
def _kind(func: Any) -> _Kind:
    if not isinstance(func, OpOverload):
        return _Kind(True, False, (), False, False, "", False)
    schema, name = func._schema, func._schema.name
    ends = func.namespace not in ("aten", "prims", "profiler", "prim") or name in _EXCHANGES_MEMORY
    is_view = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
    return _Kind(
        ends=ends,
        passes=not ends and (is_view or torch.Tag.inplace_view in func.tags or func.namespace in ("profiler", "prim")),
        written=tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write),
        makes=any(r.alias_info is None and "Tensor" in str(r.type) for r in schema.returns),
        seeded=torch.Tag.nondeterministic_seeded in func.tags,
        blank="empty" if name in _EMPTY else "constant" if name in _CONSTANT else "",
        normalizes=func in _BATCH_NORMS,
    )


def _written(kind: _Kind, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    found: list[Any] = []
    for i, name in kind.written:
        value = args[i] if i < len(args) else kwargs.get(name)
        found.extend(value if isinstance(value, (list, tuple)) else [value])
    if kind.normalizes and args[5]:
        found.extend(args[3:5])
    return [t for t in found if isinstance(t, Tensor)]


def _split(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], list[Any]]:
    """The tensors among the arguments, and the other arguments with ``Tensor`` in their places."""
    tensors: list[Tensor] = []
    others: list[Any] = []
    for a in (*args, *kwargs, *kwargs.values()) if kwargs else args:
        if isinstance(a, Tensor):
            tensors.append(a)
            others.append(Tensor)
        elif isinstance(a, list) and a and any(isinstance(item, Tensor) for item in a):
            tensors.extend(item for item in a if isinstance(item, Tensor))
            others.append([Tensor if isinstance(item, Tensor) else item for item in a])
        else:
            others.append(a)
    return tensors, others


def _settings() -> tuple[Any, ...]:
    """What a result depends on besides the arguments."""
    c = torch._C
    return (
        torch.get_default_dtype(),
        c.get_num_threads(),
        c._get_deterministic_algorithms(),
        c._get_float32_matmul_precision(),
        c._get_mkldnn_enabled(),
        c._get_cudnn_enabled(),
    )


def _generator(tensors: Sequence[Tensor], others: Sequence[Any]) -> torch.Generator | None:
    for other in others:
        if isinstance(other, torch.Generator):
            return other
    device = tensors[0].device if tensors else next((o for o in others if isinstance(o, torch.device)), None)
    if device is None or device.type == "cpu":
        return torch.default_generator
    if device.type == "meta":
        return None
    generators = torch.get_device_module(device).default_generators
    return generators[device.index or 0]  # type: ignore[no-any-return]


def _random_state(generator: torch.Generator | None) -> bytes:
    return b"" if generator is None else generator.get_state().numpy().tobytes()


def _without_override(function: Any) -> Any:
    """autograd's function as it is when no function mode is active: the mode must see the hooks that it runs."""
    own = FunctionType(function.__code__, {**function.__globals__, "has_torch_function": lambda _: False})
    own.__defaults__, own.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return own


_BACKWARDS = {f: _without_override(f) for f in (torch.autograd.backward, torch.autograd.grad)}
_BACKWARDS[Tensor.backward] = torch.autograd.backward


def _same(recorded: Sequence[Any], others: Sequence[Any]) -> bool:
    """Equal by ``repr``: 1 is not True, and -0.0 is not 0.0."""
    return len(recorded) == len(others) and all(
        a is b or (type(a) is type(b) and repr(a) == repr(b)) for a, b in zip(recorded, others, strict=True)
    )


def _flat(out: Any) -> Sequence[Any]:
    return out if isinstance(out, (tuple, list)) else (out,)


def _checksum(storage: torch.UntypedStorage) -> int:
    return zlib.crc32(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(t: Tensor) -> Tensor:
    """As integers: -0.0 is not 0.0, and NaN is NaN."""
    t = t.detach().resolve_conj().resolve_neg()
    t = torch.view_as_real(t) if t.is_complex() else t
    return t.view(_INTEGERS[t.element_size()]) if t.is_floating_point() else t


class _Copy(NamedTuple):
    """The bits of an input from outside."""

    tensor: Tensor
    stride: tuple[int, ...]

    def matches(self, other: Tensor) -> bool:
        mine = self.tensor
        if (mine.dtype, mine.size(), self.stride, mine.device) != (
            other.dtype,
            other.size(),
            other.stride(),
            other.device,
        ):
            return False
        return torch.equal(_bits(mine), _bits(other))


class _Output:
    """A storage that an operation of the first pass has made, and the tensor on it that was returned."""

    __slots__ = ("alias", "checksum", "geometry", "kept", "number", "options", "reference", "storage", "tensor")

    def __init__(self, t: Tensor, number: int) -> None:
        self.number, self.storage, self.reference = number, storage_of(t), StorageWeakRef(t.untyped_storage())
        self.geometry, self.options = (t.storage_offset(), t.size(), t.stride()), (t.dtype, t.device)
        self.tensor = None if t.is_cpu else TensorWeakRef(t)
        self.kept: torch.UntypedStorage | None = None
        self.checksum: int | None = None
        self.alias: Tensor | None = None

    def is_held_elsewhere(self) -> bool:
        return torch._C._storage_Use_Count(self.storage) > 1

    def hand_out(self) -> Tensor:
        memory, self.kept = self.kept, None
        assert memory is not None
        if self.is_held_elsewhere():
            memory = memory.clone()
        return torch.empty(0, dtype=self.options[0], device=self.options[1]).set_(memory, *self.geometry)

    def take_checksum(self) -> None:
        """So that writes by those who hold the memory are noticed: by its bits, on a device by a version counter."""
        if self.kept is not None and self.is_held_elsewhere():
            if self.tensor is None:
                self.checksum = _checksum(self.kept)
                return
            tensor = self.tensor()
            if tensor is None:  # nobody else shares the version counter with us
                self.kept = None
            else:
                self.alias, self.checksum = tensor.detach(), tensor._version

    def compare_checksum(self) -> None:
        if self.kept is not None and self.checksum is not None:
            if self.checksum != (_checksum(self.kept) if self.alias is None else self.alias._version):
                self.kept = None
            self.alias = None


class _Entry:
    """An operation of the first pass. ``returns`` is the type of its result, None if it is never reused."""

    __slots__ = ("func", "inputs", "others", "outputs", "random", "returns", "settings")
    func: Any
    inputs: list[Any]  # a description, a copy, or None: not compared
    others: list[Any]
    outputs: list[Any]
    random: tuple[bytes, Tensor | None] | None
    returns: type | None
    settings: tuple[Any, ...]

    def made(self) -> list[_Output]:
        return [o for o in self.outputs if isinstance(o, _Output)]


class _Call(NamedTuple):
    """An operation that is about to run."""

    kind: _Kind
    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: list[Tensor]
    storages: list[int]
    others: list[Any]

    def run(self, tape: Tape) -> Any:
        tape.count_writes(self.kind, self.args, self.kwargs)
        return self.func(*self.args, **self.kwargs)

    def makes(self, t: Tensor) -> bool:
        is_plain = type(t) is Tensor and t.layout is torch.strided and not t.is_quantized and not t.is_nested
        return is_plain and storage_of(t) not in self.storages

    def statistics(self) -> list[int]:
        is_training = self.kind.normalizes and self.args[5]
        return [id(t) for t in self.args[3:5] if t is not None] if is_training else []


class _Watch(TorchFunctionMode):
    """Sees what is not an operation: memory that is given away, function transforms."""

    def __init__(self, mode: _Mode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mode = self.mode
        if func in _GIVES_AWAY_MEMORY:
            for t in args:
                if isinstance(t, Tensor) and t.layout is torch.strided:
                    mode.tape.given_away.add(storage_of(t))
        elif torch._C._functorch.peek_interpreter_stack() is not None:
            mode.end("a function transform")
        if mode.is_idle:
            mode.leave()
        elif func in _BACKWARDS:
            with self:
                return _BACKWARDS[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self.made: dict[int, int] = {}  # storages of this pass, and their numbers on the tape
        self.blank: set[int] = set()  # those that no operation has filled
        self.references: list[StorageWeakRef] = []  # so that no other storage gets an address that is in `made`
        self.has_started = tape.start is None
        self.is_over = False  # no operation is compared or recorded any more
        self.is_idle = False  # nothing is left to do at all
        self.is_left = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> _Mode:
        super().__enter__()
        self.is_left = False
        return self

    def __exit__(self, *error: Any) -> None:
        if not self.is_left:
            self.is_left = True
            super().__exit__(*error)

    def leave(self) -> None:
        """Leaves the stack of modes as soon as that is possible: an operation costs more under a mode."""
        if not self.is_left and _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)

    def end(self, why: str) -> None:
        raise NotImplementedError

    def perform(self, call: _Call) -> Any:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_idle:
            return func(*args, **kwargs)
        kind, tape = _kind(func), self.tape
        if not self.is_over and self.has_started:
            if kind.passes:
                if args and type(args[0]) is nn.Parameter:
                    tape.know(storage_of(args[0]), args[0])
                return func(*args, **kwargs)
            call = self.read(kind, func, args, kwargs)
            if call is not None and not self.is_over:
                return self.perform(call)
        tape.count_writes(kind, args, kwargs)
        return func(*args, **kwargs)

    def read(self, kind: _Kind, func: Any, args: Any, kwargs: Any) -> _Call | None:
        """The operation's inputs; None if it is not for the tape, because it makes no memory and writes to none on it."""
        if kind.ends:
            self.end(f"{func} is not a plain operation of torch")
            return None
        tensors, others = _split(args, kwargs)
        storages = []
        for t in tensors:
            if type(t) not in (Tensor, nn.Parameter) or t.layout is not torch.strided:
                self.end(f"{func} reads a tensor that is not plain")
                return None
            storage = storage_of(t)
            if storage not in self.made:
                if t.is_inference() or t.is_quantized or t.is_nested or t._is_zerotensor():
                    self.end(f"{func} reads a tensor that is not plain")
                    return None
                if storage in self.tape.moved:
                    self.end(f"{func} reads {self.tape.moved[storage]}, which is perturbed")
                    return None
                if type(t) is nn.Parameter:
                    self.tape.know(storage, t)
            storages.append(storage)
        call = _Call(kind, func, args, kwargs, tensors, storages, others)
        if kind.makes:
            return call
        is_recorded = False
        for t in _written(kind, args, kwargs):
            storage = storage_of(t)
            if storage in self.blank and (
                not t.is_cpu or (kind.seeded and t.numel() * t.element_size() == t.untyped_storage().nbytes())
            ):
                self.blank.discard(storage)
            is_recorded |= storage in self.made and storage not in self.blank
        return call if is_recorded else None

    def describe(self, t: Tensor, storage: int) -> tuple[Any, ...] | None:
        """Equal descriptions are equal values. None: the value itself must be compared."""
        tape = self.tape
        number = self.made.get(storage)
        geometry = (t.size(), t.stride(), t.storage_offset(), t.dtype, t.is_conj(), t.is_neg())
        if number is not None and storage not in self.blank and storage not in tape.given_away:
            return (number, geometry)
        if t.is_cpu and (storage not in tape.versioned or storage in tape.given_away):
            return None
        if number is not None or storage in tape.given_away:
            return (object(),)  # device memory that others may have filled: equal to nothing
        tape.know(storage, t)
        return (storage, geometry, t._version, tape.writes.get(storage, 0))

    def adopt(self, call: _Call, t: Tensor, number: int) -> None:
        """The storage of t is number on the tape."""
        storage = storage_of(t)
        self.made[storage] = number
        self.references.append(StorageWeakRef(t.untyped_storage()))
        self.tape.writes.pop(storage, None)  # of another storage that had this address
        self.tape.given_away.discard(storage)
        if call.kind.blank and (call.kind.blank == "empty" or t.is_cpu):
            self.blank.add(storage)


class _Record(_Mode):
    def end(self, why: str) -> None:
        if self.is_over:
            return
        tape, self.is_over, self.tape.ended = self.tape, True, why
        self.is_idle = True
        for entry in tape.entries:
            if entry.returns is not None and not any(tape.is_spoilt(o) for o in entry.made()):
                alive = [torch.UntypedStorage._new_with_weak_ptr(o.reference.cdata) for o in entry.made()]
                if None not in alive:
                    self.is_idle = False
                    for output, storage in zip(entry.made(), alive, strict=True):
                        output.kept = storage

    def perform(self, call: _Call) -> Any:
        tape, entry = self.tape, _Entry()
        entry.func, entry.others, entry.settings, entry.random = call.func, call.others, _settings(), None
        updated = call.statistics()
        entry.inputs = [
            None if id(t) in updated else self.describe(t, storage) or _Copy(t.detach().clone(), t.stride())
            for t, storage in zip(call.tensors, call.storages, strict=True)
        ]
        generator = _generator(call.tensors, call.others) if call.kind.seeded else None
        before = _random_state(generator)
        out = call.run(tape)
        if call.kind.seeded:
            entry.random = before, None if generator is None else generator.get_state()
        entry.outputs = []
        can_reuse = call.kind.makes and not call.kind.written and not call.kind.blank
        for value in _flat(out):
            if not isinstance(value, Tensor):
                entry.outputs.append(value)
            elif call.makes(value) and storage_of(value) not in self.made:
                entry.outputs.append(_Output(value, tape.numbers))
                self.adopt(call, value, tape.numbers)
                tape.numbers += 1
            else:
                entry.outputs.append(None)
                can_reuse = False
        if updated and not call.tensors[0].is_cpu:  # only on the host are the statistics known to come out the same
            can_reuse = False
        entry.returns = type(out) if can_reuse and entry.made() else None
        tape.entries.append(entry)
        return out


class _Replay(_Mode):
    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        self.position = 0
        self.is_over = self.is_idle = not any(o.kept for entry in tape.entries for o in entry.made())

    def end(self, why: str) -> None:
        if not self.is_over:
            self.is_over = self.is_idle = True
            if self.position < len(self.tape.entries):
                self.tape.ended = why
            self.tape.entries.clear()

    def perform(self, call: _Call) -> Any:
        tape = self.tape
        if self.position == len(tape.entries):
            self.end("")
            return call.func(*call.args, **call.kwargs)
        entry = tape.entries[self.position]
        generator = _generator(call.tensors, call.others) if call.kind.seeded else None
        why = self.difference(entry, call, generator)
        if why:
            self.end(f"{call.func} has {why}")
            return call.func(*call.args, **call.kwargs)
        self.position += 1
        if entry.returns is None or any(o.kept is None or tape.is_spoilt(o) for o in entry.made()):
            for output in entry.made():
                output.kept = None
            out = call.run(tape)
            for value, output in zip(_flat(out), entry.outputs, strict=True):
                if isinstance(output, _Output):
                    self.adopt(call, value, output.number)
            return out
        values = []
        for output in entry.outputs:
            values.append(output.hand_out() if isinstance(output, _Output) else output)
            if isinstance(output, _Output):
                self.adopt(call, values[-1], output.number)
        tape.reused += 1
        if generator is not None and entry.random is not None:
            generator.set_state(entry.random[1])
        if call.statistics():
            tape.count_writes(call.kind, call.args, call.kwargs)
            _aten.batch_norm_update_stats(call.args[0], call.args[3], call.args[4], call.args[6])
        return values[0] if issubclass(entry.returns, Tensor) else entry.returns(values)

    def difference(self, entry: _Entry, call: _Call, generator: torch.Generator | None) -> str:
        if entry.func is not call.func:
            return f"taken the place of {entry.func}"
        if len(entry.inputs) != len(call.tensors) or not _same(entry.others, call.others):
            return "other arguments"
        if entry.settings != _settings():
            return "other settings of torch"
        if entry.random is not None and entry.random[0] != _random_state(generator):
            return "another random state"
        for recorded, t, storage in zip(entry.inputs, call.tensors, call.storages, strict=True):
            if isinstance(recorded, _Copy):
                if not recorded.matches(t):
                    return "another input"
            elif recorded is not None and recorded != self.describe(t, storage):
                return "another input"
        return ""


class Tape:
    """The operations of a first forward, and their outputs that the second forward may use again.

    Args:
        moved: the weights that will be perturbed, by name.
        start: the inner model of a DDP, in whose forward the tape begins: what DDP does before is not on it.
        between: whether the caller's code runs between ``recording()`` and ``replaying()``, outside of any mode. Then
            memory that others hold and the weights are compared by their checksums; on a device, by their versions.

    Attributes:
        operations: operations of the first forward, without views, until the tape ended.
        reused: those that were not computed again in the second.
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
        mode.end("the first pass ended")
        self.operations = len(self.entries)
        if mode.is_idle:
            self.release()
        elif self.between:
            self._take_checksums()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Around the second forward and backward."""
        if self.between:
            self._compare_checksums()
        mode = _Replay(self)
        try:
            with self._active(mode):
                yield
        finally:
            self.release()

    def release(self) -> None:
        """Drops everything that is kept."""
        for held in (self.entries, self.writes, self.given_away, self.versioned, self.checksums):
            held.clear()

    @contextmanager
    def _active(self, mode: _Mode) -> Iterator[None]:
        def begin(*_: Any) -> None:
            mode.has_started = True

        with ExitStack() as stack:
            if self.start is not None:
                stack.enter_context(self.start.register_forward_pre_hook(begin, prepend=True))
            if not mode.is_idle:
                stack.enter_context(_Watch(mode))
                stack.enter_context(mode)
            yield

    def know(self, storage: int, t: Tensor) -> None:
        if storage not in self.versioned and storage not in self.moved:
            self.versioned[storage] = t.detach()

    def count_writes(self, kind: _Kind, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for t in _written(kind, args, kwargs) if kind.written or kind.normalizes else ():
            if t.layout is torch.strided:
                self.writes[storage_of(t)] = self.writes.get(storage_of(t), 0) + 1

    def is_spoilt(self, output: _Output) -> bool:
        return output.storage in self.writes or output.storage in self.given_away

    def _take_checksums(self) -> None:
        for entry in self.entries:
            for output in entry.made():
                output.take_checksum()
        self.checksums = {s: _checksum(t.untyped_storage()) for s, t in self.versioned.items() if t.is_cpu}

    def _compare_checksums(self) -> None:
        for entry in self.entries:
            for output in entry.made():
                output.compare_checksum()
        for storage, checksum in self.checksums.items():
            if _checksum(self.versioned[storage].untyped_storage()) != checksum:
                self.given_away.add(storage)
