"""The cost of a step that perturbs some of the parameters, from the cost of each operation of one pass.

With P the perturbed parameters, a step of ``minimize`` with norm="masked" costs, beyond the base optimizer's step,

    operations of the forward that run again     from the first that reads P on, and those before it whose output is
                                                 not kept (replay.py)
  + operations of the backward that lead to P    input gradients back to the earliest of P, weight gradients of P
  + Python code and dispatch of the second forward, keeping and comparing what it reuses, moving P to w + e and back
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch._C import _storage_address as storage_of  # type: ignore[attr-defined]
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from sparsesam.distributed.ddp import unwrap
from sparsesam.filters import FilterLayers, WeightGradient, weight_gradient
from sparsesam.masks.packed import PackedMask
from sparsesam.perturbation import Perturbation, Target
from sparsesam.replay import Tape
from sparsesam.utils import operators
from sparsesam.utils.batches import call_model
from sparsesam.utils.checks import check_choice, check_count
from sparsesam.utils.graph import leaf_of, nodes_of, tensors_in
from sparsesam.utils.restore import RNGState, preserve_model_state

How = Literal["time", "cpu-time", "count"]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StepCosts:
    """The costs of one pass, in seconds or, with ``how="count"``, in multiply-adds."""

    shapes: Mapping[str, torch.Size]  # of the trainable parameters
    first_use: Mapping[str, int]  # the first operation that reads each parameter; unused ones are left out
    second_forward: Floats  # its cost, by the first operation that reads a perturbed parameter
    backward: Floats  # by operation
    needed: Flags  # by operation of the backward and parameter: whether the parameter's gradient needs it
    filters: Mapping[str, tuple[float, float]]  # dW of 1/4 and of 3/4 of the filters, where they can be computed alone
    moving: float  # to w + e and back, per weight
    base: float  # a forward and a backward; the base optimizer's update costs little beside them

    def step(self, masks: Mapping[str, Tensor]) -> float:
        """Returns the cost of a step that perturbs these entries, in steps of the base optimizer."""
        kept = {name: mask for name, mask in masks.items() if name in self.first_use and bool(mask.any())}
        extra = self.passing(kept)
        for name, mask in kept.items():
            rows = mask.flatten(1) if mask.dim() > 1 else mask.reshape(1, -1)
            has_whole_rows = torch.equal(rows.any(1), rows.all(1))
            extra += self.perturbing(name, int(mask.count_nonzero()) / mask.numel(), sliced=has_whole_rows)
        return 1 + extra / self.base

    def passing(self, names: Iterable[str]) -> float:
        """Returns the cost of the second forward and of the input gradients if these parameters are perturbed."""
        names = list(names)
        if not names:
            return 0.0
        used = self.needed[:, [self._columns[name] for name in names]].any(1) & (self.needed.sum(1) > 1)
        return float(self.second_forward[min(self.first_use[name] for name in names)] + self.backward[used].sum())

    def perturbing(self, name: str, share: float, *, sliced: bool = True) -> float:
        """Returns the cost of dW of a share of a parameter's filters, and of moving them to w + e and back."""
        whole = self._own[self._columns[name]]
        gradient = float(share > 0) * whole
        if sliced and name in self.filters and 0 < share < 1:
            quarter, three_quarters = self.filters[name]
            gradient = max(quarter + (share - 0.25) / 0.5 * (three_quarters - quarter), share * whole)
        return float(gradient + share * self.shapes[name].numel() * self.moving)

    @cached_property
    def _columns(self) -> dict[str, int]:
        return {name: column for column, name in enumerate(self.shapes)}

    @cached_property
    def _own(self) -> Floats:
        return _own_costs(self.backward, self.needed)


def _own_costs(backward: Floats, needed: Flags) -> Floats:
    """Returns, by parameter, the cost of the operations that no other gradient needs: usually its weight gradient."""
    return np.asarray((backward * (needed.sum(1) == 1)) @ needed)


def step_costs(model: nn.Module, example_input: Any, *, how: How = "time", repeats: int = 5) -> StepCosts:
    """Measure (medians of ``repeats`` rounds after one of warm-up) or count the cost of each operation of a pass.

    ``"cpu-time"`` measures the CPU time of this process, which with one thread is more reliable beside other work;
    ``"count"`` is the same on every machine.

    ``example_input`` is a batch of the training size: a tensor, a tuple of positional arguments or a dictionary of
    keyword arguments. Passes run in training mode, as a step does; the model, its buffers and the random state are
    restored.
    """
    check_choice("how", how, get_args(How))
    check_count("repeats", repeats, "5 give a usable median")
    model = unwrap(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ValueError(f"model must have parameters that require a gradient, got {type(model).__name__} without")
    device = next(iter(parameters.values())).device
    rounds: list[tuple[Floats, ...]] = []
    with preserve_model_state(model, evaluate=False, freeze=False), _stopwatch(how, device) as clock:
        for module in model.modules() if not model.training else ():
            module.training = True
        passes = _Passes(model, tree_map_only(Tensor, Tensor.detach, example_input), parameters, clock)
        filters = [_some_filters(parameters.values(), most=most) for most in (False, True)]
        for _ in range(1 if how == "count" else 1 + repeats):
            trace = passes.traced({})
            forward, backward = np.array(trace.forward), np.array(trace.backward)
            if rounds and [len(forward), len(backward)] != [len(costs) for costs in rounds[0][1:3]]:
                raise ValueError(
                    "model must run the same operations in each pass over example_input, but they differ from pass to "
                    "pass; choose the weights to perturb by hand, with fixed_mask"
                )
            dw = [_own_costs(np.array(some.backward), some.needed()) for some in map(passes.traced, filters)]
            last = max(trace.first_use, key=trace.first_use.__getitem__)
            both_forwards = 0.0 if how == "count" else passes.replayed(last)
            rounds.append((np.array([*passes.plain(), both_forwards, passes.moved()]), forward, backward, *dw))
    whole, forward, backward, *dw = (np.median(costs[1:] or costs, 0) for costs in zip(*rounds, strict=True))
    plain_forward, plain_backward, both_forwards, moving = whole.tolist()
    place, first = np.arange(len(forward)), np.arange(len(forward) + 1)[:, None]
    runs_again = (place >= first) | ~np.array(trace.is_reusable) | (np.array(trace.freed) <= first)
    # Python code, autograd and dispatch: what a pass costs beyond its operations.
    second_forward = runs_again @ forward + max(0.0, plain_forward - forward.sum())
    end = trace.first_use[last]
    reusing = max(0.0, both_forwards - plain_forward - second_forward[end]) / max(1, end)
    return StepCosts(
        shapes={name: p.shape for name, p in parameters.items()},
        first_use=trace.first_use,
        second_forward=second_forward + reusing * first[:, 0],
        backward=backward * (plain_backward / max(backward.sum(), 1e-12)),
        needed=trace.needed(),
        filters={n: (a, b) for (n, p), a, b in zip(parameters.items(), *dw, strict=True) if id(p) in passes.sliced},
        moving=moving,
        base=plain_forward + plain_backward,
    )


@contextmanager
def _stopwatch(how: How, device: torch.device) -> Iterator[Callable[[], float]]:
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

    torch's FlopCounterMode also tracks modules by hooks on their tensors, which would keep activations.
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


@dataclass
class _Passes:
    """Runs passes of a model with the same random numbers; gradients are not accumulated."""

    model: nn.Module
    inputs: Any
    parameters: Mapping[str, Tensor]
    clock: Callable[[], float]
    sliced: set[int] = field(default_factory=set)  # ids of weights of layers that can compute dW of some filters

    def __post_init__(self) -> None:
        self._rng = RNGState(self.model.parameters())
        self._state = self._rng.read()

    def _forward(self) -> Any:
        self._rng.write(self._state)
        return call_model(self.model, self.inputs)

    def _backward(self, output: Any, trace: _Trace | None = None) -> float:
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if not outputs:
            raise ValueError(
                "model must return a tensor that depends on its parameters, got none in its output for example_input"
            )
        seeds = [torch.full_like(tensor, 1 / max(1, tensor.numel())) for tensor in outputs]  # as of a mean loss
        with nullcontext() if trace is None else trace.following(outputs):
            start = self.clock()
            torch.autograd.grad(outputs, list(self.parameters.values()), seeds, allow_unused=True)
            return self.clock() - start

    def plain(self) -> tuple[float, float]:
        """Returns the costs of a forward and of its backward."""
        start = self.clock()
        output = self._forward()
        return self.clock() - start, self._backward(output)

    def traced(self, wanted: Mapping[Tensor, WeightGradient]) -> _Trace:
        """``wanted``: the filters of which dW is computed, in layers that can."""
        layers, trace = FilterLayers(wanted), _Trace(self.parameters, self.clock)
        with layers, trace:
            output = self._forward()
        with layers.narrowed():
            self._backward(output, trace)
        self.sliced |= layers.called
        return trace

    def replayed(self, name: str) -> float:
        """Returns the cost of both forwards of a step that perturbs this parameter."""
        tape, start = Tape({name: self.parameters[name]}), self.clock()
        with tape.recording():
            self._forward()
        with tape.replaying():
            self._forward()
        return self.clock() - start

    @torch.no_grad()
    def moved(self) -> float:
        """Returns the cost per weight of the norm, of moving to w + e and of moving back, on the largest tensor."""
        weight = max(self.parameters.values(), key=Tensor.numel).clone()
        target = Target("weight", weight, torch.ones_like(weight), None, rho=1e-3, eta=None)
        perturbation, start = Perturbation(), self.clock()
        perturbation.move([target], perturbation.norm([target], "masked"))
        perturbation.undo()
        return (self.clock() - start) / weight.numel()


def _some_filters(parameters: Iterable[Tensor], *, most: bool) -> dict[Tensor, WeightGradient]:
    """Returns the weight gradient of every fourth filter, or with ``most`` of all others."""
    found = {}
    for parameter in parameters:
        kept = torch.full_like(parameter, most, dtype=torch.bool)
        kept[::4] = not most
        want = weight_gradient(PackedMask.pack(kept), parameter, ascent="explicit", norm="masked")
        if want is not None:
            found[parameter] = want
    return found


class _Trace(TorchDispatchMode):
    """Notes the cost of each operation of a pass, how long its output is kept, and which gradients need it."""

    def __init__(self, parameters: Mapping[str, Tensor], clock: Callable[[], float]) -> None:
        super().__init__()
        self.clock = clock
        self.forward: list[float] = []
        self.is_reusable: list[bool] = []  # as far as the operation and its output are concerned, while it is alive
        self.freed: list[float] = []  # the operation before which the output was freed
        self.first_use: dict[str, int] = {}
        self.backward: list[float] = []
        self._needed: list[int] = []  # a bit for each parameter
        self._names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in parameters.items():
            self._names[storage_of(parameter)].append(name)
        self._bits = {id(parameter): 1 << column for column, parameter in enumerate(parameters.values())}
        self._alive: dict[int, tuple[int, StorageWeakRef]] = {}  # by storage: the operation that made it
        self._leads_to: dict[Any, int] = {}  # by node of the graph, the parameters
        self._waiting: list[tuple[list[tuple[float, Any]], Any]] = []  # costs and outputs, inputs

    def needed(self) -> Flags:
        return np.array([[bool(row & bit) for bit in self._bits.values()] for row in self._needed])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._leads_to:
            result, cost = self._timed(func, args, kwargs)
            # Inputs and outputs are held until the node is done, so that no storage gets the address of another.
            self._waiting.append((self._parts(func, args, result, cost), (args, kwargs)))
            return result
        return self._run_forward(func, args, kwargs)

    def _timed(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        start = self.clock()
        result = func(*args, **kwargs)
        return result, self.clock() - start

    def _run_forward(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Note what replay.py decides by: who reads parameters, and which outputs are alive and not written to."""
        place, kind, read = len(self.forward), operators.kind_of(func, args), _storages(args, kwargs)
        for storage, (maker, reference) in list(self._alive.items()):
            if reference.expired():
                del self._alive[storage]
                self.freed[maker] = min(place, self.freed[maker])
        for storage in read if not kind.is_view else ():
            for name in self._names.get(storage, ()):
                self.first_use.setdefault(name, place)
        for storage in _storages(operators.written_by(kind, args, kwargs)).keys() & self._alive.keys():
            self.is_reusable[self._alive[storage][0]] = False
        result, cost = self._timed(func, args, kwargs)
        for storage, tensor in _storages(result).items():
            if storage not in read:
                self._alive[storage] = place, StorageWeakRef(tensor.untyped_storage())
        # A batch norm that is reused computes its statistics again, most of its cost.
        is_reusable = kind.is_plain and kind.makes and not (kind.written or kind.is_blank or kind.is_batch_norm)
        self.is_reusable.append(is_reusable)
        self.freed.append(np.inf)
        self.forward.append(cost)
        return result

    @contextmanager
    def following(self, outputs: Sequence[Tensor]) -> Iterator[None]:
        """Around the backward of these outputs."""
        nodes = set(nodes_of([tensor.grad_fn for tensor in outputs]))
        leaves = {node: leaf for node in nodes if (leaf := leaf_of(node)) is not None}
        self._leads_to = {node: self._bits.get(id(leaf), 0) for node, leaf in leaves.items()}
        for node in sorted(nodes - leaves.keys(), key=lambda node: node._sequence_nr()):  # made after those it leads to
            self._leads_to[node] = 0
            for following, _ in node.next_functions:
                self._leads_to[node] |= self._leads_to.get(following, 0)
            node.register_hook(self._attribute)
        try:
            with self:
                yield
        finally:
            self._leads_to.clear()  # the nodes hold this object through their hooks
            self._waiting.clear()

    def _parts(self, func: Any, args: Any, result: Any, cost: float) -> list[tuple[float, Any]]:
        """Returns the cost of an operation and what it made; of a convolution, separately for dX, db and dW."""
        if func is not torch.ops.aten.convolution_backward.default or not args[-1][1]:
            return [(cost, result)]
        parts = []
        for place in (0, 2):
            if args[-1][place]:
                _, alone = self._timed(func, (*args[:-1], [place == other for other in range(3)]), {})
                parts.append((min(alone, cost), result[place]))
                cost -= parts[-1][0]
        return [*parts, (cost, result[1])]

    def _attribute(self, gradients: Sequence[Tensor | None], _: Any) -> None:
        """Called after each node: find the operations from which each of its gradients was computed."""
        node = torch._C._current_autograd_node()
        needed: dict[int, int] = defaultdict(int)
        for gradient, (following, _) in zip(gradients, node.next_functions, strict=True):
            for storage in _storages(gradient):
                needed[storage] |= self._leads_to.get(following, 0)
        for parts, inputs in reversed(self._waiting):
            of_all = 0
            for cost, made in parts:
                row = 0
                for storage in _storages(made):
                    row |= needed[storage]
                self.backward.append(cost)
                self._needed.append(row or self._leads_to[node])
                of_all |= self._needed[-1]
            for storage in _storages(inputs):
                needed[storage] |= of_all
        self._waiting.clear()


def _storages(*trees: Any) -> dict[int, Tensor]:
    """Returns a tensor on each storage; those of sparse and nested tensors are left out."""
    plain = (t for t in tensors_in(trees) if t.layout is torch.strided and not t.is_nested)
    return {storage_of(tensor): tensor for tensor in plain}
