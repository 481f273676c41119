"""What torch's operators read, write, make and draw; the bits of tensors; the entries of a tape."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

storage_of: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]
_aten = torch.ops.aten
_CONSTANT = [
    f"{new}{name}{like}" for name in ("zeros", "ones", "full") for new, like in (("", ""), ("", "_like"), ("new_", ""))
]
_EMPTY = ["empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"]
_EXCHANGES_MEMORY = ["set_", "resize_", "resize_as_", "_resize_output_", "_efficientzerotensor"]
# They update the running statistics, arguments 3 and 4, if argument 5 is true; their schemas do not say so.
_BATCH_NORMS = {_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Kind(NamedTuple):
    """What is the same in every call of an overload."""

    is_plain: bool = False  # of aten or prims, and leaves every tensor in its memory
    is_view: bool = False  # reads and writes no memory
    makes: bool = False  # returns new tensors
    is_seeded: bool = False
    is_empty: bool = False  # makes memory without values
    is_blank: bool = False  # makes memory that has yet to be filled: empty or constant
    is_batch_norm: bool = False
    is_region: bool = False  # compiled code
    updates: tuple[int, ...] = ()  # inputs of a region that it writes to
    written: tuple[tuple[int, str], ...] | None = None  # arguments, by position and name; None: unknown


_UNKNOWN = Kind()
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
            kind = _UNKNOWN
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
        written=() if is_view else written if is_torchs else None,  # schemas of collectives do not say what they write
    )


def _kind_of_region(region: Any, values: Sequence[Any]) -> Kind:
    """Plain, if it draws no random numbers, and what it writes to are inputs in host memory."""
    graph = getattr(region.original_gm, "graph", None)
    if graph is None or torch._functorch.config.donated_buffer:
        return _UNKNOWN
    inputs, updates = [node for node in graph.nodes if node.op == "placeholder"], []
    for node in graph.nodes:
        if node.op != "call_function" or node.target.__module__ in ("_operator", "math"):  # sizes, items
            continue
        kind = kind_of(node.target, ())
        if not kind.is_plain or kind.is_seeded or kind.is_batch_norm or "inductor_" in str(node.target):
            return _UNKNOWN
        if kind.written:
            index = inputs.index(node.args[0]) if node.args[0] in inputs else None
            if index is None or not values[index].is_cpu:
                return _UNKNOWN
            updates.append(index)
    return Kind(is_plain=True, makes=True, is_region=True, updates=tuple(updates), written=())


def written_by(kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    if kind.written is None:
        return split(args, kwargs)[0]
    found: list[Any] = [args[1][i] for i in kind.updates]
    if kind.is_batch_norm and args[5]:
        found.extend(args[3:5])
    for i, name in kind.written:
        value = args[i] if i < len(args) else kwargs.get(name)
        found.extend(value if isinstance(value, (list, tuple)) else [value])
    return [t for t in found if isinstance(t, Tensor)]


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


def conditions(generator: torch.Generator | None) -> tuple[Any, ...]:
    """What a result depends on besides the arguments."""
    c, state = torch._C, b"" if generator is None else generator.get_state().numpy().tobytes()
    backends = c._get_mkldnn_enabled(), c._get_cudnn_enabled(), c._get_float32_matmul_precision()
    return state, torch.get_default_dtype(), torch.get_num_threads(), c._get_deterministic_algorithms(), *backends


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


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Of the same shape and type, and equal as integers: -0.0 is not 0.0, and NaN is NaN."""
    return (a.dtype, a.size(), a.device) == (b.dtype, b.size(), b.device) and torch.equal(_bits(a), _bits(b))


def _bits(t: Tensor) -> Tensor:
    t = t.detach().resolve_conj().resolve_neg()
    t = torch.view_as_real(t) if t.is_complex() else t
    return t.view(_INTEGERS[t.element_size()]) if t.is_floating_point() else t


def checksum(t: Tensor) -> int:
    """Of its whole storage, in host memory."""
    return zlib.crc32(torch.empty(0, dtype=torch.uint8, device="cpu").set_(t.untyped_storage()).numpy().data)


def has_storage(t: Tensor) -> bool:
    return t.layout is torch.strided and not t.is_nested


def nodes_of(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield all nodes of the autograd graph that can be reached from ``roots``."""
    waiting, seen = list(roots), set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


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
    """The function as it is without function modes: ours must stay active for the hooks that it runs."""
    names = dict.fromkeys(["has_torch_function", "has_torch_function_unary"], lambda _: False)
    own = FunctionType(function.__code__, {**function.__globals__, **names}, argdefs=function.__defaults__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


RUNS_HOOKS = {f: _unintercepted(f) for f in (torch.autograd.backward, torch.autograd.grad, Tensor.backward)}


# ---- operations of the first pass, for the second to use again ------------------------------------------------


class Call(NamedTuple):
    """An operation that is about to run."""

    kind: Kind
    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: list[Tensor]
    storages: list[int]
    others: list[Any]  # arguments, and conditions
    inputs: list[Any]  # a description of each tensor
    generator: torch.Generator | None
    written: list[Tensor]  # arguments that it writes to

    @property
    def writes_statistics(self) -> bool:
        """Whether what it writes can be compared and written again: small tensors in host memory."""
        return (self.kind.is_batch_norm or self.kind.is_region) and all(t.is_cpu for t in self.written)

    def run(self) -> tuple[Any, Sequence[Any]]:
        """What it returns, and the values in that."""
        out = self.func(*self.args, **self.kwargs)
        return out, out if isinstance(out, (tuple, list)) else [out]


class Output:
    """A storage that an operation has made, and the tensor on it that was returned."""

    def __init__(self, t: Tensor, number: int, reference: StorageWeakRef) -> None:
        self.number, self.reference = number, reference
        self.geometry = t.storage_offset(), t.size(), t.stride()
        self.options: dict[str, Any] = {"dtype": t.dtype, "device": t.device}
        self.kept: torch.UntypedStorage | None = None  # the memory, if it is alive

    def keep(self) -> None:
        self.kept = torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)

    def own(self) -> None:
        """Keep a copy of memory that somebody else holds."""
        if self.kept is not None and torch._C._storage_Use_Count(self.reference.cdata) > 1:
            self.kept = self.kept.clone()

    def again(self, _: Call) -> Tensor:
        memory: Any = self.kept
        return torch.empty(0, **self.options).set_(memory, *self.geometry)


class Alias:
    """An output of a compiled region that is one of its inputs, or a view of it."""

    def __init__(self, t: Tensor, tensors: list[Tensor], index: int) -> None:
        self.index, self.is_input = index, t is tensors[index]
        self.geometry = t.size(), t.stride(), t.storage_offset()

    def again(self, call: Call) -> Tensor:
        source = call.tensors[self.index]
        return source if self.is_input else source.as_strided(*self.geometry)


@dataclass(slots=True)
class Entry:
    """An operation of the first pass."""

    func: Any
    others: list[Any]
    inputs: list[Any]  # as in a call, or a stride and a copy
    state: Tensor | None  # that it left in the generator
    outputs: list[Any]
    written: list[Tensor]  # what it left in the statistics that it writes
    returns: type | None  # None: it always runs

    def made(self) -> list[Output]:
        return [o for o in self.outputs if type(o) is Output]

    def keep(self) -> None:
        for output in self.made() if self.returns is not None else ():
            output.keep()

    def settle(self, spoilt: Set[int]) -> None:
        """Keep nothing that is dead or spoilt, and nothing that somebody else holds."""
        made = self.made()
        is_whole = all(o.kept is not None and o.reference.cdata not in spoilt for o in made)
        self.returns = self.returns if is_whole else None
        for output in made:
            if is_whole:
                output.own()
            else:
                output.kept = None

    def again(self, call: Call) -> tuple[Any, Sequence[Any]]:
        """As ``Call.run``, without running."""
        assert self.returns is not None
        values = [o.again(call) if isinstance(o, (Output, Alias)) else o for o in self.outputs]
        if call.generator is not None and self.state is not None:
            call.generator.set_state(self.state)
        for t, value in zip(call.written, self.written, strict=True):
            t.copy_(value)
        return self.returns(values) if self.returns in (tuple, list) else values[0], values

    def difference(self, call: Call) -> str:
        """Of a call in the second pass; empty: its result is the same."""
        if self.func is not call.func:
            return f"taken the place of {self.func}"
        if len(self.inputs) != len(call.inputs) or not same(self.others, call.others):
            return "other arguments, another random state or other settings of torch"
        for recorded, described, t in zip(self.inputs, call.inputs, call.tensors, strict=True):
            is_same = recorded == described
            if described is None and isinstance(recorded[-1], Tensor):
                is_same = recorded[0] == t.stride() and same_bits(recorded[1], t)
            if not is_same:
                return "another input"
        return ""
