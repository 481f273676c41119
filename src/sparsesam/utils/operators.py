"""What torch's operators read, write, make and draw; their outputs in the first pass; the bits of tensors."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]
from torch.utils.weak import TensorWeakRef

storage_of: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]
Mode = TypeVar("Mode", bound=TorchFunctionMode)
_aten = torch.ops.aten
_CONSTANT = [
    f"{new}{name}{like}" for name in ("zeros", "ones", "full") for new, like in (("", ""), ("", "_like"), ("new_", ""))
]
_EMPTY = ["empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"]
_EXCHANGES_MEMORY = ["set_", "resize_", "resize_as_", "_resize_output_", "_efficientzerotensor"]
# They update the running statistics, arguments 3 and 4, if argument 5 is true; their schemas do not say so.
_BATCH_NORMS = {_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default}
# In compiled code as in eager, products and sums of these are rounded one by one.
_EXACT = (torch.float32, torch.float64, torch.int64)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Kind(NamedTuple):
    """What is the same in every call of an overload."""

    is_plain: bool  # of aten or prims, and leaves every tensor in its memory
    is_view: bool  # reads and writes no memory
    makes: bool  # returns new tensors
    is_seeded: bool
    is_empty: bool  # makes memory without values
    is_blank: bool  # makes memory that has yet to be filled: empty or constant
    is_batch_norm: bool
    is_region: bool  # compiled code
    statistics: tuple[tuple[int, float], ...]  # inputs s of a region that it only updates, s <- c * s + x, and their c
    written: tuple[tuple[int, str], ...] | None  # arguments, by position and name; None: unknown


_OPAQUE = Kind(False, False, False, False, False, False, False, False, (), None)
_KINDS: dict[Any, Kind] = {}
_REGIONS: WeakKeyDictionary[Any, Kind] = WeakKeyDictionary()


def kind_of(func: Any, args: Sequence[Any]) -> Kind:
    kind = _KINDS.get(func)
    if kind is None:
        if isinstance(func, OpOverload):
            kind = _KINDS[func] = _kind_of_overload(func)
        elif str(func) == "inductor_compiled_code":  # what torch.compile's wrap_inductor_compiled_regions shows
            kind = _REGIONS.get(args[0]) or _REGIONS.setdefault(args[0], _kind_of_region(*args))
        else:
            kind = _OPAQUE
    return kind


def _kind_of_overload(func: OpOverload) -> Kind:
    schema, name = func._schema, func._schema.name.partition("::")[2]
    is_alias = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
    is_idle = func.namespace in ("profiler", "prim")
    is_torchs = is_idle or func.namespace in ("aten", "prims")
    is_plain = is_torchs and name not in _EXCHANGES_MEMORY
    is_view = is_plain and (is_idle or is_alias or torch.Tag.inplace_view in func.tags)
    written = tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write)
    return Kind(
        is_plain=is_plain,
        is_view=is_view,
        makes=any(r.alias_info is None and "Tensor" in str(r.type) for r in schema.returns),
        is_seeded=torch.Tag.nondeterministic_seeded in func.tags,
        is_empty=name in _EMPTY,
        is_blank=name in _EMPTY or name in _CONSTANT,
        is_batch_norm=func in _BATCH_NORMS,
        is_region=False,
        statistics=(),
        written=() if is_view else written if is_torchs else None,  # schemas of collectives do not say what they write
    )


def _kind_of_region(region: Any, values: Sequence[Any]) -> Kind:
    """Plain, if it draws no random numbers, and writes to its inputs only to update statistics in host memory."""
    opaque = _OPAQUE._replace(makes=True, is_region=True)
    graph = getattr(region.original_gm, "graph", None)
    if graph is None or torch._functorch.config.donated_buffer:
        return opaque
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    written, statistics, is_plain = [], [], True
    for node in graph.nodes:
        if node.op == "call_function" and node.target.__module__ not in ("_operator", "math"):  # sizes, items
            kind = kind_of(node.target, ())
            if not kind.is_plain or kind.is_batch_norm or kind.written is None:
                return opaque
            is_plain &= not kind.is_seeded and "inductor_" not in str(node.target)
            if kind.written and node.args[0] not in inputs:
                return opaque
            if kind.written:
                index, factor = inputs.index(node.args[0]), _factor(node)
                written.append((1, str(index)))
                is_exact = values[index].is_cpu and values[index].dtype in _EXACT
                if factor is not None and is_exact:  # otherwise c * s + x may be rounded once, or wrap around
                    statistics.append((index, factor))
    if not is_plain or len(statistics) < len(written):
        return opaque._replace(written=tuple(written))
    return opaque._replace(is_plain=True, statistics=tuple(statistics), written=())


def _factor(copy: Any) -> float | None:
    """The c of a write s <- c * s + x, if s is neither read otherwise nor returned; None of other writes."""
    old, new = copy.args[:2]
    if new.target is not _aten.add.Tensor or new.kwargs or new.args[0] is new.args[1]:
        return None
    is_product = [getattr(term, "target", None) is _aten.mul.Tensor and term.args[0] is old for term in new.args]
    factor, readers = 1, {old: {copy, new}, new: {copy}, copy: set()}
    if any(is_product):
        product = new.args[is_product.index(True)]
        factor, readers = product.args[1], {old: {copy, product}, product: {new}, new: {copy}, copy: set()}
    is_update = all(node.users.keys() == users for node, users in readers.items())
    return factor if is_update and isinstance(factor, (int, float)) and 0 < factor < math.inf else None


def written_by(kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    if kind.written is None:
        return split(args, kwargs)[0]
    found: list[Any] = []
    for i, name in kind.written:
        value = args[1][int(name)] if name.isdigit() else args[i] if i < len(args) else kwargs.get(name)
        found.extend(value if isinstance(value, (list, tuple)) else [value])
    return [t for t in found if isinstance(t, Tensor)] + running_statistics(kind, args)


def running_statistics(kind: Kind, args: Sequence[Any]) -> list[Tensor]:
    """Those that a batch norm or a compiled region updates."""
    if kind.is_region:
        return [args[1][i] for i, _ in kind.statistics]
    return [t for t in args[3:5] if t is not None] if kind.is_batch_norm and args[5] else []


def split(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], list[Any]]:
    """The tensors among the arguments, and the other arguments with ``Tensor`` in their places."""
    tensors: list[Tensor] = []
    others: list[Any] = []
    for a in (*args, *kwargs, *kwargs.values()) if kwargs else args:
        if isinstance(a, Tensor):
            tensors.append(a)
            others.append(Tensor)
        elif isinstance(a, (list, tuple)) and any(isinstance(item, Tensor) for item in a):
            tensors.extend(item for item in a if isinstance(item, Tensor))
            others.append([Tensor if isinstance(item, Tensor) else item for item in a])
        else:
            others.append(a)
    return tensors, others


def same(recorded: Sequence[Any], others: Sequence[Any]) -> bool:
    """Equal by ``repr``: 1 is not True, and -0.0 is not 0.0."""
    return len(recorded) == len(others) and all(
        a is b or (type(a) is type(b) and repr(a) == repr(b)) for a, b in zip(recorded, others, strict=True)
    )


def settings() -> tuple[Any, ...]:
    """What a result depends on besides the arguments."""
    c = torch._C
    backends = c._get_mkldnn_enabled(), c._get_cudnn_enabled(), c._get_float32_matmul_precision()
    return torch.get_default_dtype(), torch.get_num_threads(), c._get_deterministic_algorithms(), *backends


def generator_of(tensors: Sequence[Tensor], others: Iterable[Any]) -> torch.Generator | None:
    """What a random operation draws from; None on the meta device."""
    device = tensors[0].device if tensors else torch.device("cpu")
    for other in others:
        if isinstance(other, torch.Generator):
            return other
        if isinstance(other, torch.device):
            device = other
    if device.type == "cpu":
        return torch.default_generator
    return None if device.type == "meta" else torch.get_device_module(device).default_generators[device.index or 0]


def random_state(generator: torch.Generator | None) -> bytes:
    return b"" if generator is None else generator.get_state().numpy().tobytes()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Of the same shape and type, and equal as integers: -0.0 is not 0.0, and NaN is NaN."""
    return (a.dtype, a.size(), a.device) == (b.dtype, b.size(), b.device) and torch.equal(_bits(a), _bits(b))


def _bits(t: Tensor) -> Tensor:
    t = t.detach().resolve_conj().resolve_neg()
    t = torch.view_as_real(t) if t.is_complex() else t
    return t.view(_INTEGERS[t.element_size()]) if t.is_floating_point() else t


def checksum(storage: torch.UntypedStorage) -> int:
    """Of host memory."""
    return zlib.crc32(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy().data)


def is_transformed() -> bool:
    """Whether a function transform, such as ``vmap``, is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def has_storage(t: Tensor) -> bool:
    return t.layout is torch.strided and not t.is_nested


def is_plain(t: Tensor) -> bool:
    if type(t) not in (Tensor, nn.Parameter) or not has_storage(t):
        return False
    return not (t.is_quantized or t.is_inference() or t._is_zerotensor())


#: functions after which others may read and write a tensor's memory
GIVES_AWAY_MEMORY = {
    *(Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.__cuda_array_interface__.__get__),
    *(Tensor.untyped_storage, Tensor.storage, Tensor.share_memory_, Tensor.data.__set__),  # type: ignore[attr-defined]
    *(Tensor.__dlpack__, to_dlpack, Tensor.apply_, Tensor.map_, Tensor.map2_),
}


def _unintercepted(function: Any) -> Any:
    """A function of autograd as it is without function modes: the mode must stay active for the hooks that it runs."""
    own = FunctionType(function.__code__, {**function.__globals__, "has_torch_function": lambda _: False})
    own.__defaults__, own.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return own


_backward, _grad = _unintercepted(torch.autograd.backward), _unintercepted(torch.autograd.grad)


def _tensor_backward(t: Tensor, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
    _backward(t, gradient, *args, **kwargs)


RUNS_HOOKS = {torch.autograd.backward: _backward, torch.autograd.grad: _grad, Tensor.backward: _tensor_backward}


class Call(NamedTuple):
    """An operation that is about to run."""

    kind: Kind
    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: list[Tensor]
    storages: list[int]
    others: list[Any]
    generator: torch.Generator | None

    def run(self) -> tuple[Any, Sequence[Any], list[Tensor]]:
        """What it returns, that as a sequence, and what a compiled region adds to its statistics."""
        args, added = self.args, []
        if self.kind.statistics:  # c * -0.0 + x is x
            inputs = list(args[1])
            added = [inputs[i].new_empty_strided(inputs[i].size(), inputs[i].stride()) for i, _ in self.kind.statistics]
            for (i, _), x in zip(self.kind.statistics, added, strict=True):
                inputs[i] = x.fill_(-0.0)  # compiled code relies on the strides of s
            args = args[0], inputs
        out = self.func(*args, **self.kwargs)
        if added:
            self.update_statistics(added)
        return out, out if isinstance(out, (tuple, list)) else (out,), added

    def updated(self) -> set[int]:
        """The ids of statistics that it updates and does not read: a batch norm reads its first three arguments."""
        read = self.args[:3] if self.kind.is_batch_norm else ()
        return {id(t) for t in running_statistics(self.kind, self.args)} - {id(t) for t in read}

    def update_statistics(self, added: list[Tensor]) -> None:
        if self.kind.is_batch_norm and running_statistics(self.kind, self.args):
            _aten.batch_norm_update_stats(self.args[0], self.args[3], self.args[4], self.args[6])
        for (i, factor), x in zip(self.kind.statistics, added, strict=True):
            self.args[1][i].mul_(factor).add_(x)


def uncompiled(mode: Mode) -> Mode:
    """The mode, whose own code torch.compile traces but does not compile.

    What runs as it is between two compiled graphs would be compiled within the mode, and what is compiled is not seen.
    """
    import torch._dynamo  # takes long, and is imported by the first step in any case

    torch._dynamo.eval_frame.skip_code(type(mode).__torch_function__.__code__)
    return mode


# ---- operations of the first pass, for the second to use again ------------------------------------------------


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
        if self.kept is None or self.seen is not None or not self.is_held_elsewhere():
            return
        if self.tensor is None:
            self.seen = checksum(self.kept)
        elif (tensor := self.tensor()) is not None:
            self.shared, self.seen = tensor.detach(), tensor._version
        else:
            self.kept = None

    def is_intact(self) -> bool:
        """Whether the memory is kept, and nobody has written to it since ``watch``."""
        shared, self.shared = self.shared, None
        if self.kept is None or self.seen is None:
            return self.kept is not None
        return self.seen == (checksum(self.kept) if shared is None else shared._version)


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

    __slots__ = ("added", "func", "inputs", "others", "outputs", "random", "returns", "settings")

    def __init__(self, call: Call, inputs: list[Any]) -> None:
        self.func, self.others, self.settings = call.func, call.others, settings()
        self.inputs = inputs  # a description, a copy with its stride, or None: not compared
        self.random: tuple[bytes, Tensor | None] = random_state(call.generator), None
        self.outputs: list[Any] = []
        self.added: list[Tensor] = []
        self.returns: type | None = None  # None: it always runs

    def made(self) -> list[Output]:
        return [o for o in self.outputs if type(o) is Output]
