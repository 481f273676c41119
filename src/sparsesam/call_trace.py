"""One training pass taken apart: what each call of the model costs, forward and backward, where it stands.

Calls are seen as the engine sees them (``sparsesam.ascent.passes``): one per torch function that the model's own
code calls. Nothing is run in isolation, so caches, memory and fused kernels are those of a real step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from sparsesam.ascent.layers import LAYERS
from sparsesam.ascent.memo import map_tensors, tensors_in
from sparsesam.ascent.plan import make_plan
from sparsesam.masks.packed import PackedMask

How = Literal["time", "count"]
#: every gradient; input gradients alone; every gradient, but of the weights only for every fourth filter
Kind = Literal["everything", "inputs", "some filters"]
Clock = Callable[[], float]

#: The share of the filters of which "some filters" computes the weight gradient.
SOME = 0.25
_MARK = "_sparsesam_call"


@dataclass
class Call:
    """One call of a torch function: what it used, what it depends on, and what it cost."""

    function: str
    parameters: tuple[str, ...]
    upstream: frozenset[int]  # earlier calls that it depends on, directly or through others
    leads_back: bool  # whether an input needs a gradient
    sliced: bool  # whether its weight gradient can be had for some filters alone
    forward: float = 0.0
    backward: float = 0.0


@contextmanager
def stopwatch(how: How, device: torch.device) -> Iterator[Clock]:
    """A clock that tells seconds, or the multiply-adds made so far."""
    if how == "count":
        with MultiplyAdds() as counter:
            yield lambda: counter.total
        return
    synchronize = getattr(getattr(torch, device.type, None), "synchronize", None) if device.type != "cpu" else None

    def seconds() -> float:
        if synchronize is not None:
            synchronize()
        return time.perf_counter()

    yield seconds


class MultiplyAdds(TorchDispatchMode):
    """Counts products and convolutions exactly, everything else as one per entry that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **kwargs, out_val=result) / 2
        elif not func.is_view:
            self.total += sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


def trace(model: nn.Module, inputs: Any, clock: Clock, kind: Kind) -> list[Call]:
    """Run the model forward and backward once, in its present mode, and leave no gradients behind."""
    mode = _Trace(model, clock, kind)
    with mode:
        output = call(model, inputs)
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not outputs:
        raise ValueError("model must return a tensor that depends on its parameters, got none in its output")
    mode.differentiate(outputs)
    return mode.calls


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's output for a tensor, a tuple of arguments or a dictionary of named ones."""
    inputs = map_tensors(torch.Tensor.detach, inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


class _Trace(TorchFunctionMode):
    def __init__(self, model: nn.Module, clock: Clock, kind: Kind) -> None:
        super().__init__()
        self.clock, self.kind = clock, kind
        self.calls: list[Call] = []
        self.names = {id(p): name for name, p in model.named_parameters()}
        self._leaves: dict[int, Tensor] = {}
        self._nodes: dict[int, Any] = {}
        self._last = 0.0
        some = {
            name: PackedMask.pack(_every_fourth(p)) if p.dim() > 1 else None
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        self._filters = make_plan(model, some, "explicit").perturbed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__":
            result = func(*args, **kwargs)
            if not isinstance(result, Tensor):
                return result
        tensors = list(tensors_in(args, kwargs))
        used = [t for t in tensors if id(t) in self.names and t.requires_grad]
        given = [t for t in tensors if id(t) not in self.names]
        one = Call(
            function=getattr(func, "__name__", str(func)),
            parameters=tuple(dict.fromkeys(self.names[id(t)] for t in used)),
            upstream=frozenset().union(*(self._reached(t) for t in given)),
            leads_back=any(t.requires_grad for t in given),
            sliced=self._can_slice(func, args, kwargs),
        )
        index = len(self.calls)
        self.calls.append(one)
        func, args, kwargs = self._replaced(one, func, args, kwargs)
        versions = [t._version for t in given]
        start = self.clock()
        result = func(*args, **kwargs)
        one.forward = self.clock() - start
        written = [t for t, version in zip(given, versions, strict=True) if t._version != version]
        for tensor in tensors_in(result, written):
            if id(tensor) not in self.names:
                setattr(tensor, _MARK, (self, one.upstream | {index}))
        self._watch(result, written, one)
        return result

    def _reached(self, tensor: Tensor) -> frozenset[int]:
        owner, reached = getattr(tensor, _MARK, (None, frozenset()))
        return reached if owner is self else frozenset()

    def _can_slice(self, func: Any, args: Any, kwargs: Any) -> bool:
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        groups = args[6] if len(args) > 6 else kwargs.get("groups", 1)
        return func in LAYERS and groups == 1 and self._filters.get(id(weight)) is not None

    def _replaced(self, one: Call, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        if self.kind == "inputs" and one.leads_back:
            # The weights of the very first layers stay: without them there would be no backward pass at all.
            args, kwargs = map_tensors(self._shield, args), map_tensors(self._shield, kwargs)
        elif self.kind == "some filters" and one.sliced:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            func = partial(LAYERS[func], self._filters[id(weight)])
        for tensor in tensors_in(args, kwargs):
            if id(tensor) in self.names and tensor.requires_grad:
                self._leaves[id(tensor)] = tensor
        return func, args, kwargs

    def _shield(self, tensor: Tensor) -> Tensor:
        return tensor.detach() if id(tensor) in self.names else tensor

    def _watch(self, result: Any, written: list[Tensor], one: Call) -> None:
        """Steps of the backward pass that came with this call are its own."""
        waiting = [tensor.grad_fn for tensor in tensors_in(result, written)]
        while waiting:
            node = waiting.pop()
            if node is None or id(node) in self._nodes or hasattr(node, "variable"):
                continue
            self._nodes[id(node)] = node
            node.register_hook(partial(self._ran, one))
            waiting += [following for following, _ in node.next_functions]

    def _ran(self, one: Call, *_: Any) -> None:
        now = self.clock()
        one.backward += now - self._last
        self._last = self.clock()

    def differentiate(self, outputs: list[Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        seeds = [torch.randn(t.shape, generator=generator).to(t) / max(1, t.shape[0] if t.dim() else 1) for t in outputs]
        self._last = self.clock()
        torch.autograd.grad(outputs, list(self._leaves.values()), seeds, allow_unused=True)
        self._nodes.clear()


def _every_fourth(parameter: Tensor) -> Tensor:
    """At least one filter, and not all of them."""
    mask = torch.zeros_like(parameter, dtype=torch.bool)
    mask[:: round(1 / SOME)] = True
    return mask
