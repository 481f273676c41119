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

**Reuse** needs an output that is alive at the end of the tape and not written or given away until the first pass is
over, loss and backward included. Memory that somebody else holds then is copied. Random operations need the generator
state that they had, and leave the one that they left. Batch norms and compiled regions need the statistics that they
had, and leave those that they left: a step starts both passes with the same.

Below any dispatch mode torch differentiates views of overwritten tensors by other formulas, which may round otherwise.
Not seen are kernels outside of the dispatcher that write to memory which an operation has filled, operations of other
threads, weights written through memory that was given away earlier, and how long an object lives.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sparsesam.utils import operators
from sparsesam.utils.operators import Alias, Call, Entry, Kind, Output, storage_of

#: Bytes that operations must read, on average, for a tape to save more time on a CPU than it takes: all operations of a
#: first pass go through Python. A tape as such costs as much as this number of operations.
OPERATION, BEGINNING = 1 << 21, 10


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
        elif torch._C._functorch.peek_interpreter_stack() is not None:
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
        #: storages of this pass: their numbers, and references so that no other storage gets such an address
        self.made: dict[int, tuple[int, StorageWeakRef]] = {}
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
        tape, kind = self.tape, operators.kind_of(func, args)
        call: Call | None = None
        written = operators.written_by(kind, args, kwargs)
        if self.has_started and not self.is_over:
            if not kind.is_view:
                call = self.read(kind, func, args, kwargs, written)
            elif args and type(args[0]) is nn.Parameter:
                tape.know(storage_of(args[0]), args[0])
        for t in written:
            if operators.has_storage(t):
                tape.writes[storage_of(t)] += 1
        return func(*args, **kwargs) if call is None else self.perform(call)

    def read(self, kind: Kind, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Call | None:
        """None: the operation is not on the tape; it ends it, or neither makes memory nor writes to any on it."""
        tensors, others = operators.split(args, kwargs)
        storages = [storage_of(t) for t in tensors if operators.is_plain(t)]
        why = "" if kind.is_plain else "is not a plain operation of aten or prims"
        if len(storages) < len(tensors):
            why = why or "reads a tensor that is not plain"
        elif not self.tape.moved.keys().isdisjoint(storages):
            moved = next(storage for storage in storages if storage in self.tape.moved)
            why = why or f"reads {self.tape.moved[moved]}, which is perturbed"
        if why:
            self.end(f"{func} {why}")
            return None
        is_recorded = kind.makes
        for t in written:
            storage = storage_of(t)
            is_filled = kind.is_seeded and t.numel() * t.element_size() == t.untyped_storage().nbytes()
            if is_filled or not t.is_cpu:
                self.blank.discard(storage)
            is_recorded |= storage in self.made and storage not in self.blank
        if not is_recorded:
            return None
        # A batch norm reads three arguments. Those that it updates are not compared on a device: it runs again.
        unread = {id(t) for t in written if not t.is_cpu} - {id(a) for a in args[:3]} if kind.is_batch_norm else set()
        inputs = [
            ("updated",) if id(t) in unread else self.describe(t, storage)
            for t, storage in zip(tensors, storages, strict=True)
        ]
        generator = operators.generator_of(tensors, others) if kind.is_seeded else None
        others += operators.conditions(generator)
        return Call(kind, func, args, kwargs, tensors, storages, others, inputs, generator, written)

    def describe(self, t: Tensor, storage: int) -> tuple[Any, ...] | None:
        """Equal descriptions are equal values. None: the values themselves must be compared."""
        tape = self.tape
        geometry = (t.size(), t.stride(), t.storage_offset(), t.dtype, t.is_conj(), t.is_neg())
        is_loose = storage in tape.given_away or storage in self.blank
        if storage in self.made and not is_loose:
            return self.made[storage][0], geometry
        if t.is_cpu and (is_loose or (storage not in tape.versioned and type(t) is not nn.Parameter)):
            return None
        if is_loose:
            return (object(),)  # device memory that others may have filled: equal to nothing
        tape.know(storage, t)
        return storage, geometry, t._version, tape.writes[storage]

    def adopt(self, kind: Kind, t: Tensor, number: int) -> StorageWeakRef:
        """The storage of t gets its number."""
        reference = StorageWeakRef(t.untyped_storage())
        storage = reference.cdata
        self.made[storage] = number, reference
        self.tape.writes.pop(storage, None)  # another storage had this address
        self.tape.given_away.discard(storage)
        if kind.is_empty or (kind.is_blank and t.is_cpu):
            self.blank.add(storage)
        return reference


class _Record(_Mode):
    def end(self, why: str) -> None:
        if not self.is_over:
            self.is_over, self.tape.ended = True, why
            for entry in self.tape.entries:
                entry.keep()

    def perform(self, call: Call) -> Any:
        tape, kind, outputs = self.tape, call.kind, []
        inputs = [
            (t.stride(), t.detach().clone()) if described is None else described
            for t, described in zip(call.tensors, call.inputs, strict=True)
        ]
        out, values = call.run()
        tape.bytes += sum(t.nbytes for t in call.tensors)
        can_reuse = not kind.is_blank and (not call.written or call.writes_statistics)
        for value in values:
            storage = storage_of(value) if isinstance(value, Tensor) and operators.is_plain(value) else None
            if storage is None:
                can_reuse &= not isinstance(value, (Tensor, tuple, list))
            elif storage in call.storages:
                index = call.storages.index(storage)
                can_reuse &= kind.is_region and value.dtype == call.tensors[index].dtype
                value = Alias(value, call.tensors, index)
            elif storage in self.made:
                can_reuse = False
            else:
                number = len(self.made)
                value = Output(value, number, self.adopt(kind, value, number))
            outputs.append(value if can_reuse or isinstance(value, Output) else None)
        state = None if call.generator is None else call.generator.get_state()
        returns = type(out) if can_reuse else None
        written = [t.clone() for t in call.written] if can_reuse else []
        tape.entries.append(Entry(call.func, call.others, inputs, state, outputs, written, returns))
        if kind.is_region:  # of many outputs, all must live
            tape.entries[-1].keep()
        return out


class _Replay(_Mode):
    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        self.is_over = self.is_idle = not tape.entries

    def end(self, why: str) -> None:
        if not self.is_over:
            self.is_over = self.is_idle = True
            if self.tape.entries:
                self.tape.ended = why
            self.tape.entries.clear()

    def perform(self, call: Call) -> Any:
        tape = self.tape
        if not tape.entries or (why := tape.entries[0].difference(call)):
            self.end(f"{call.func} has {why}" if tape.entries else "")
            return call.func(*call.args, **call.kwargs)
        entry = tape.entries.popleft()
        can_reuse = entry.returns is not None
        tape.reused += can_reuse
        out, values = entry.again(call) if can_reuse else call.run()
        for value, output in zip(values, entry.outputs, strict=True):
            if type(output) is Output:
                self.adopt(call.kind, value, output.number)
        return out


class Tape:
    """The operations of a first forward, and their outputs that the second forward may use again.

    Args:
        moved: the weights that will be perturbed, by name.
        start: the inner model of a DDP, in whose forward the tape begins: what DDP does before is not on it.
        between: whether the user's code runs between the two contexts. Writes there to weights are noticed by
            checksums; on a device, by version counters only.

    ``operations`` are those of the first forward, without views, until the tape ended; ``reused`` those that the second
    did not compute again; ``ended`` says where and why that ended, with the weight's or the operation's name.
    """

    def __init__(self, moved: Mapping[str, Tensor], *, start: nn.Module | None = None, between: bool = True) -> None:
        self.moved = {storage_of(t): name for name, t in moved.items()}
        self.start, self.between = start, between
        self.operations, self.reused, self.ended = 0, 0, ""
        self.bytes = 0  # that the operations read
        self.entries: deque[Entry] = deque()
        self.writes: Counter[int] = Counter()
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
            self._settle()
        except BaseException:
            self.release()
            raise

    def _settle(self) -> None:
        """Keep for the second pass what is alive and unwritten, and nobody else's."""
        self.operations = len(self.entries)
        for entry in self.entries:
            entry.settle(self.writes.keys() | self.given_away)
        if all(entry.returns is None for entry in self.entries):
            self.release()
        elif self.between:
            self.checksums = {s: operators.checksum(t) for s, t in self.versioned.items() if t.is_cpu}

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Around the second forward and backward."""
        for storage, checksum in self.checksums.items():
            if operators.checksum(self.versioned[storage]) != checksum:
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
                # What torch.compile leaves between two compiled graphs would be compiled within the mode, and unseen.
                torch._dynamo.eval_frame.skip_code(_Watch.__torch_function__.__code__)
                with _Watch(mode), mode:
                    yield

    @property
    def is_worthwhile(self) -> bool:
        """Whether running the operations again would take longer than recording them did."""
        return self.bytes >= OPERATION * (BEGINNING + self.operations)

    def know(self, storage: int, t: Tensor) -> None:
        if storage not in self.versioned and storage not in self.moved:
            self.versioned[storage] = t.detach()
