"""The second forward of a step, without the work that the first has done.

Below autograd, an operation of the second forward that has the same overload and the same inputs as in the first
returns its output of the first, if that is still alive and unwritten; everything else runs. Python code, hooks and
autograd run as always, and every value in anybody's hands is right at every moment: nothing is known about modules.

**Memory, not tensors.** A tensor is a storage and a geometry. A storage was made by an operation on the tape, and known
by its number, or comes from outside. On the tape are operations that make storages or write to made ones; views run.

**Inputs from outside** are compared by their bits in host memory; parameters and device memory by storage, geometry,
version and writes. Memory given away (``numpy()``, ``data_ptr()``) or not filled yet (``empty``, ``zeros``) is outside.

**The tape ends** at the first operation that reads a perturbed weight; also at operations not of aten or prims (such as
collectives; compiled regions are operations), function transforms, subclasses, sparse, nested and inference tensors.

**Reuse** needs an output that is alive at the end of the tape and not written afterwards, by the loss, the backward or
the user's code between the passes. Memory that somebody holds is copied first. Random operations need the generator
state that they had, and leave the one that they left.

Below any dispatch mode torch differentiates views of overwritten tensors by other formulas, which may round otherwise.
Not seen are kernels outside of the dispatcher that write to memory which an operation has filled, operations of other
threads, weights written through memory that was given away earlier, and how long an object lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sparsesam.utils import operators
from sparsesam.utils.operators import Alias, Call, Entry, Kind, Output, storage_of

#: Bytes that a convolution or a product reads in the time that it takes to record an operation and to find it again;
#: the number of operations that are recorded in the time that it takes to begin.
OPERATION, BEGINNING = 1 << 15, 10


class _Watch(TorchFunctionMode):
    """Sees what is not an operation: memory that is given away, and function transforms."""

    def __init__(self, mode: _Mode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, mode = kwargs or {}, self.mode
        if torch.compiler.is_dynamo_compiling() or mode.is_busy or mode.is_idle:
            return func(*args, **kwargs)
        if func in operators.GIVES_AWAY_MEMORY:
            mode.tape.given_away.update(storage_of(t) for t in operators.split(args, {})[0] if operators.has_storage(t))
        elif operators.is_transformed():
            mode.end("a function transform")
        elif func in operators.RUNS_HOOKS:
            with self:
                return operators.RUNS_HOOKS[func](*args, **kwargs)
        return func(*args, **kwargs)


class _Mode(TorchDispatchMode):
    """What both passes have in common: which operations are on the tape, and what they read."""

    supports_higher_order_operators = True
    end: Callable[[str], None]
    perform: Callable[[Call], Any]

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self.made: dict[int, int] = {}  # storages of this pass, and their numbers on the tape
        self.blank: set[int] = set()  # those that no operation has filled
        self.has_started = tape.start is None
        self.is_over = False  # operations are no longer recorded or compared
        self.is_idle = False  # nor are writes counted
        self.is_busy = False  # with an operation

    def begin(self, *_: Any) -> None:
        self.has_started = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        was_busy, self.is_busy = self.is_busy, True
        try:
            return func(*args, **(kwargs or {})) if self.is_idle else self.handle(func, args, kwargs or {})
        finally:
            self.is_busy = was_busy

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        kind = operators.kind_of(func, args)
        if self.has_started and not self.is_over:
            if kind.is_view and args and type(args[0]) is nn.Parameter:
                self.tape.know(storage_of(args[0]), args[0])
            call = None if kind.is_view else self.read(kind, func, args, kwargs)
            if call is not None:
                return self.perform(call)
        self.tape.count_writes(kind, args, kwargs)
        return func(*args, **kwargs)

    def read(self, kind: Kind, func: Any, args: Any, kwargs: Any) -> Call | None:
        """None: the operation is not on the tape; it ends it, or neither makes memory nor writes to any on it."""
        tensors, others = operators.split(args, kwargs)
        why = "" if kind.is_plain else "is not a plain operation of aten or prims"
        storages: list[int] = []
        for t in tensors:
            if why or not operators.is_plain(t):
                why = why or "reads a tensor that is not plain"
                break
            storages.append(storage_of(t))
            if storages[-1] in self.tape.moved:
                why = f"reads {self.tape.moved[storages[-1]]}, which is perturbed"
            elif type(t) is nn.Parameter:
                self.tape.know(storages[-1], t)
        if why:
            self.end(f"{func} {why}")
            return None
        is_recorded = kind.makes
        for t in operators.written_by(kind, args, kwargs) if kind.written else ():
            storage = storage_of(t)
            is_filled = kind.is_seeded and t.numel() * t.element_size() == t.untyped_storage().nbytes()
            if is_filled or not t.is_cpu:
                self.blank.discard(storage)
            is_recorded |= storage in self.made and storage not in self.blank
        generator = operators.generator_of(tensors, others) if kind.is_seeded else None
        return Call(kind, func, args, kwargs, tensors, storages, others, generator) if is_recorded else None

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

    def adopt(self, call: Call, t: Tensor, number: int) -> None:
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

    def perform(self, call: Call) -> Any:
        tape, updated = self.tape, call.updated()
        inputs = [
            None if id(t) in updated else self.describe(t, storage) or (t.stride(), t.detach().clone())
            for t, storage in zip(call.tensors, call.storages, strict=True)
        ]
        entry = Entry(call, inputs)
        tape.count_writes(call.kind, call.args, call.kwargs)
        out, values, entry.added = call.run()
        tape.bytes += sum(t.nbytes for t in call.tensors)
        if call.generator is not None:
            entry.random = entry.random[0], call.generator.get_state()
        can_reuse = not (call.kind.written or call.kind.is_blank or (updated and not call.tensors[0].is_cpu))
        for value in values:
            storage = storage_of(value) if isinstance(value, Tensor) and operators.is_plain(value) else None
            if storage is None:
                can_reuse &= not isinstance(value, (Tensor, tuple, list))
            elif storage in call.storages:
                index = call.storages.index(storage)
                can_reuse &= call.kind.is_region and value.dtype == call.tensors[index].dtype
                value = Alias(value, call.tensors, index)
            elif storage in self.made:
                can_reuse = False
            else:
                self.adopt(call, value, tape.numbers)
                value, tape.numbers = Output(value, tape.numbers), tape.numbers + 1
                if call.kind.is_region:  # of many outputs, all must live
                    value.keep()
            entry.outputs.append(value if can_reuse or isinstance(value, Output) else None)
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

    def perform(self, call: Call) -> Any:
        tape = self.tape
        entry = tape.entries[self.position] if self.position < len(tape.entries) else None
        if entry is None or (why := self.difference(entry, call)):
            self.end("" if entry is None else f"{call.func} has {why}")
            return call.run()[0]
        self.position += 1
        can_reuse = entry.returns is not None and all(o.is_intact() and not tape.is_spoilt(o) for o in entry.made())
        tape.count_writes(call.kind, call.args, call.kwargs)
        if not can_reuse:
            out, values, _ = call.run()
        else:
            values = [o.again(call.tensors) if isinstance(o, (Output, Alias)) else o for o in entry.outputs]
            out, tape.reused = entry.returns(values) if entry.returns in (tuple, list) else values[0], tape.reused + 1
            if call.generator is not None and entry.random[1] is not None:
                call.generator.set_state(entry.random[1])
            call.update_statistics(entry.added)
        for value, output in zip(values, entry.outputs, strict=True):
            if type(output) is Output:
                output.kept = None
                self.adopt(call, value, output.number)
                self.references.append(StorageWeakRef(value.untyped_storage()))
        return out

    def difference(self, entry: Entry, call: Call) -> str:
        is_same = entry.func is call.func and len(entry.inputs) == len(call.tensors)
        if not is_same or not operators.same(entry.others, call.others):
            return "other arguments" if entry.func is call.func else f"taken the place of {entry.func}"
        if entry.settings != operators.settings() or entry.random[0] != operators.random_state(call.generator):
            return "another random state, or other settings of torch"
        compared = zip(entry.inputs, call.tensors, call.storages, strict=True)
        return "" if all(self.matches(*pair) for pair in compared) else "another input"

    def matches(self, recorded: Any, t: Tensor, storage: int) -> bool:
        if recorded is not None and isinstance(recorded[-1], Tensor):
            return recorded[0] == t.stride() and operators.same_bits(recorded[1], t)
        return recorded is None or recorded == self.describe(t, storage)


class Tape:
    """The operations of a first forward, and their outputs that the second forward may use again.

    Args:
        moved: the weights that will be perturbed, by name.
        start: the inner model of a DDP, in whose forward the tape begins: what DDP does before is not on it.
        between: whether the user's code runs between the two contexts. Writes there, to weights and to memory that the
            user holds, are noticed by checksums; on a device, by version counters only.

    ``operations`` are those of the first forward, without views, until the tape ended; ``reused`` those that the second
    did not compute again; ``ended`` says where and why that ended, with the weight's or the operation's name.
    """

    def __init__(self, moved: Mapping[str, Tensor], *, start: nn.Module | None = None, between: bool = True) -> None:
        self.moved = {storage_of(t): name for name, t in moved.items()}
        self.start, self.between = start, between
        self.operations, self.reused, self.ended = 0, 0, ""
        self.bytes = 0  # that the operations read
        self.numbers = 0  # of storages made in the first pass
        self.entries: list[Entry] = []
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
            mode.end("the first pass is over")
            self.operations = len(self.entries)
        except BaseException:
            self.release()
            raise
        if not any(output.kept for output in self.outputs()):
            self.release()
        elif self.between:
            for output in self.outputs():
                output.watch()
            known = self.versioned.items()
            self.checksums = {storage: operators.checksum(t.untyped_storage()) for storage, t in known if t.is_cpu}

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Around the second forward and backward."""
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
        """Plain ``with`` statements, which Ctrl-C cannot leave half entered, as it can an ExitStack."""
        with nullcontext() if self.start is None else self.start.register_forward_pre_hook(mode.begin, prepend=True):
            if mode.is_idle:
                yield
            else:
                with operators.uncompiled(_Watch(mode)), mode:
                    yield

    def outputs(self) -> list[Output]:
        return [output for entry in self.entries for output in entry.made()]

    @property
    def is_worthwhile(self) -> bool:
        """Whether running the operations again would take longer than recording them did."""
        return self.bytes >= OPERATION * (BEGINNING + self.operations)

    def know(self, storage: int, t: Tensor) -> None:
        if storage not in self.versioned and storage not in self.moved:
            self.versioned[storage] = t.detach()

    def count_writes(self, kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for t in operators.written_by(kind, args, kwargs) if kind.written != () or kind.is_batch_norm else ():
            if operators.has_storage(t):
                self.writes[storage_of(t)] = self.writes.get(storage_of(t), 0) + 1

    def is_spoilt(self, output: Output) -> bool:
        return output.storage in self.writes or output.storage in self.given_away
