"""Measures the cost of each call of a model in one training pass, forward and backward.

A call is a call of a torch function by the model's own code. Nothing is run in isolation, so caches, memory and fused
kernels are those of a real step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from sparsesam.filters import LAYERS, Switch, WeightGradient, weight_gradient
from sparsesam.masks.packed import PackedMask
from sparsesam.utils.batches import call_model
from sparsesam.utils.graph import leaf_of, nodes_of, tensors_in

How = Literal["time", "cpu-time", "count"]
#: which gradients the pass computes: all; only input gradients; weight gradients for some of the filters only
PassKind = Literal["everything", "inputs", "quarter", "three quarters"]
PASS_KINDS: tuple[PassKind, ...] = get_args(PassKind)
Clock = Callable[[], float]

_MARK = "_sparsesam_call"


@dataclass
class ModuleCall:
    """The innermost module call in which a function is called."""

    held: frozenset[str]  # the module's parameters
    end: int = 0  # the number of functions called before the module returned


@dataclass
class CallCost:
    """One call of a torch function: its parameters, the calls it depends on, and its cost in each pass."""

    function: str
    parameters: tuple[str, ...]
    upstream: frozenset[int]  # earlier calls that it depends on, directly or indirectly
    leads_back: bool  # whether an input requires a gradient
    can_slice: bool  # whether its weight gradient can be computed for some filters only
    module: ModuleCall
    forwards: list[float] = field(default_factory=list)
    backwards: dict[PassKind, list[float]] = field(default_factory=lambda: {kind: [] for kind in PASS_KINDS})

    @property
    def layer(self) -> str:
        return self.parameters[0].rpartition(".")[0] or self.parameters[0] if self.parameters else self.function

    @cached_property
    def forward(self) -> float:
        return _median(self.forwards)

    @cached_property
    def input_gradient(self) -> float:
        everything = _median(self.backwards["everything"])
        if not self.parameters:
            return everything
        return min(_median(self.backwards["inputs"]), everything) if self.leads_back else 0.0

    @cached_property
    def weight_gradient(self) -> float:
        return _median(self.backwards["everything"]) - self.input_gradient

    @cached_property
    def _some_filters(self) -> tuple[float, float]:
        """The cost of dW for a quarter and for three quarters of the filters, including slicing."""
        few, most = (_median(self.backwards[kind]) - self.input_gradient for kind in ("quarter", "three quarters"))
        quarter = max(few, 0.25 * self.weight_gradient)
        return quarter, max(most, 0.75 * self.weight_gradient, quarter)

    def weight_gradient_for(self, share: float) -> float:
        """Returns the cost of dW for a share of the filters, by linear interpolation of the two measurements."""
        if not (self.can_slice and 0 < share < 1):
            return float(share > 0) * self.weight_gradient
        quarter, three_quarters = self._some_filters
        line = quarter + (share - 0.25) / 0.5 * (three_quarters - quarter)
        return max(line, share * self.weight_gradient)


def _median(costs: list[float]) -> float:
    """Returns the median without the first pass, a warm-up; of a single pass, its cost."""
    return float(statistics.median(costs[1:] or costs))


@contextmanager
def stopwatch(how: How, device: torch.device) -> Iterator[Clock]:
    """Yield a clock in seconds, in CPU seconds of this process, or in multiply-adds."""
    if how == "count":
        with MultiplyAdds() as counter:
            yield lambda: counter.total
        return
    now = time.process_time if how == "cpu-time" else time.perf_counter

    def seconds() -> float:
        if device.type in ("cuda", "xpu", "mps"):
            getattr(torch, device.type).synchronize()
        return now()

    yield seconds


class MultiplyAdds(TorchDispatchMode):
    """Counts multiply-adds of matrix products and convolutions, and one per entry that other functions compute.

    torch's FlopCounterMode also tracks modules by hooks on their tensors, which the engine would see.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = self.others = 0.0

    @property
    def total(self) -> float:
        return self.products + self.others

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.products += count(*args, **kwargs, out_val=result) / 2
        elif not func.is_view:
            self.others += sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


class Trace(TorchFunctionMode):
    """Runs one pass, forward and backward, of a model in its current mode; it accumulates no gradients.

    The first pass, of kind "everything", fills ``calls``; every pass adds its costs to them.
    """

    def __init__(self, model: nn.Module, clock: Clock, kind: PassKind, calls: list[CallCost]) -> None:
        super().__init__()
        self.model, self.clock, self.kind, self.calls = model, clock, kind, calls
        self._is_first = not calls
        self._count = 0  # calls so far
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._leaves: dict[int, Tensor] = {}
        self._nodes: set[Any] = set()
        self._last = 0.0
        self._token = object()  # marks tensors as seen by this pass; they may outlive it
        self._filters = _some_filters(model, most=kind == "three quarters")
        self._running: list[ModuleCall] = []
        self._held = {
            module: frozenset(self._names[id(p)] for p in module.parameters() if p.requires_grad)
            for module in model.modules()
        }

    def run(self, inputs: Any) -> None:
        inputs = tree_map_only(Tensor, Tensor.detach, inputs)
        entering = register_module_forward_pre_hook(self._enter)
        with self, entering, register_module_forward_hook(self._leave, always_call=True):
            output = call_model(self.model, inputs)
        self._require_same(self._count == len(self.calls))
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if not outputs:
            raise ValueError(
                "model must return a tensor that depends on its parameters, got none in its output for example_input"
            )
        seeds = [torch.full_like(tensor, 1 / max(1, tensor.numel())) for tensor in outputs]  # as for a mean loss
        self._last = self.clock()
        torch.autograd.grad(outputs, list(self._leaves.values()), seeds, allow_unused=True)
        self._nodes.clear()

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self._running.append(ModuleCall(self._held.get(module, frozenset())))

    def _leave(self, *_: Any) -> None:
        self._running.pop().end = self._count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in(args, kwargs)
        used = {id(t): t for t in tensors if id(t) in self._names and t.requires_grad}
        given = [t for t in tensors if id(t) not in self._names]
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        groups = args[6] if len(args) > 6 else kwargs.get("groups", 1)
        one = CallCost(
            function=getattr(func, "__name__", str(func)),
            parameters=tuple(self._names[key] for key in used),
            upstream=frozenset().union(*(self._reached(t) for t in given)),
            leads_back=any(t.requires_grad for t in given),
            can_slice=func in LAYERS and groups == 1 and id(weight) in self._filters,
            module=self._running[-1],
        )
        if self.kind == "inputs" and one.leads_back:
            # The weights of the first layers are not detached: without them there would be no backward pass.
            args, kwargs = tree_map_only(Tensor, lambda t: t.detach() if id(t) in used else t, (args, kwargs))
        else:
            self._leaves |= used
        if self.kind in ("quarter", "three quarters") and one.can_slice:
            func = partial(LAYERS[func], self._filters[id(weight)], Switch(on=True))
        versions = [t._version for t in given]
        start = self.clock()
        result = func(*args, **kwargs)
        spent = self.clock() - start
        written = [t for t, version in zip(given, versions, strict=True) if t._version != version]
        made = [t for t in tensors_in(result, written) if id(t) not in self._names]
        if made:
            for tensor in made:
                setattr(tensor, _MARK, (self._token, one.upstream | {self._count}))
            one = self._noted(one)
            if self.kind == "everything":
                one.forwards.append(spent)
            one.backwards[self.kind].append(0.0)
            self._watch(made, one)
        return result

    def _noted(self, one: CallCost) -> CallCost:
        """Returns the recorded call: in the first pass ``one`` itself, later the same call of the first pass."""
        if self._is_first:
            self.calls.append(one)
        self._count += 1
        self._require_same(self._count <= len(self.calls))
        first = self.calls[self._count - 1]
        self._require_same((first.function, first.parameters) == (one.function, one.parameters))
        return first

    def _require_same(self, is_same: bool) -> None:
        if not is_same:
            raise ValueError(
                "model must make the same calls in each forward of example_input, but they differ from pass to pass; "
                "choose the weights to perturb by hand, with fixed_mask"
            )

    def _reached(self, tensor: Tensor) -> frozenset[int]:
        token, reached = getattr(tensor, _MARK, (None, frozenset()))
        return reached if token is self._token else frozenset()

    def _watch(self, made: list[Tensor], one: CallCost) -> None:
        """Attribute the backward nodes that this call created to it."""
        for node in nodes_of([tensor.grad_fn for tensor in made], self._nodes):
            self._nodes.add(node)
            if leaf_of(node) is None:
                node.register_hook(partial(self._ran, one))

    def _ran(self, one: CallCost, *_: Any) -> None:
        one.backwards[self.kind][-1] += self.clock() - self._last
        self._last = self.clock()


def _some_filters(model: nn.Module, *, most: bool) -> dict[int, WeightGradient]:
    """Returns, by the id of each weight, the weight gradient of every fourth filter, or with ``most`` of the others."""
    found = {}
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.requires_grad:
            kept = torch.full_like(parameter, most, dtype=torch.bool)
            kept[::4] = not most
            want = weight_gradient(PackedMask.pack(kept), parameter, ascent="explicit", norm="masked")
            if want is not None:
                found[id(parameter)] = want
    return found
