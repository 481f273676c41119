"""The cost of a step that perturbs some of the parameters, from the operations of one pass.

With P the perturbed parameters, a step of ``minimize`` with norm="masked" costs, beyond the base optimizer's step,

    operations of the forward that run again     from the first that reads P on, and those before it whose output is
                                                 not kept (replay.py)
  + operations of the backward that lead to P    input gradients back to the earliest of P, weight gradients of P
  + moving P to w + e and back

Operations are counted, so that a cost is the same on every machine: the multiply-adds of products, and `ENTRY` for each
entry that other operations compute. Python code is not counted (python -m benchmarks budget compares with time).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from sparsesam.distributed.ddp import unwrap
from sparsesam.filters import FilterLayers, WeightGradient, weight_gradient
from sparsesam.masks.packed import PackedMask
from sparsesam.utils import operators
from sparsesam.utils.batches import call_model
from sparsesam.utils.restore import preserve_model_state

Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
#: Multiply-adds that take as long as an entry of other operations, which wait for memory: 130 for batch normalizations
#: of ResNet-18 on a CPU. Accelerators have a similar ratio of arithmetic to memory traffic, or a larger one.
ENTRY = 100.0
#: entries computed for each perturbed weight: e, w + e, and w again
_MOVING = 3.0


@dataclass(frozen=True, eq=False)
class StepCosts:
    """The costs of one pass, in multiply-adds."""

    shapes: Mapping[str, torch.Size]  # of the trainable parameters
    first_use: Mapping[str, int]  # the first operation that reads each parameter; unused ones are left out
    second_forward: Floats  # its cost, by the first operation that reads a perturbed parameter
    backward: Floats  # by operation that several gradients need; 0 for others
    needed: Mapping[str, Flags]  # by parameter and operation of the backward: whether the parameter's gradient needs it
    own: Mapping[str, float]  # by parameter, of operations that no other gradient needs: usually dW
    filters: Mapping[str, float]  # the same for a quarter of the filters, where they can be computed alone
    base: float  # a forward and a backward; the base optimizer's update costs little beside them

    def step(self, masks: Mapping[str, Tensor]) -> float:
        """Returns the cost of a step that perturbs these entries, in steps of the base optimizer."""
        kept = {name: mask for name, mask in masks.items() if name in self.first_use and bool(mask.any())}
        extra = self.passing(kept)
        for name, mask in kept.items():
            packed = PackedMask.pack(mask)
            extra += self.perturbing(name, packed.count / mask.numel(), sliced=packed.rows is not None)
        return 1 + extra / self.base

    def passing(self, names: Iterable[str]) -> float:
        """Returns the cost of the second forward and of the input gradients if these parameters are perturbed."""
        names = list(names)
        if not names:
            return 0.0
        used = np.any([self.needed[name] for name in names], axis=0)
        return float(self.second_forward[min(self.first_use[name] for name in names)] + self.backward[used].sum())

    def perturbing(self, name: str, share: float, *, sliced: bool = True) -> float:
        """Returns the cost of dW of a share of a parameter's filters, and of moving them to w + e and back."""
        if share == 0:
            return 0.0
        gradient = self.own[name]
        if sliced and name in self.filters:
            gradient -= (1 - share) / 0.75 * (gradient - self.filters[name])  # linear in the share
        return gradient + share * self.shapes[name].numel() * _MOVING * ENTRY


def step_costs(model: nn.Module, example_input: Any) -> StepCosts:
    """Count the operations of a pass.

    ``example_input`` is a batch of the training size: a tensor, a tuple of positional arguments or a dictionary of
    keyword arguments. Passes run in training mode, as a step does; the model, its buffers and the random state are
    restored.
    """
    model = unwrap(model)
    parameters: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ValueError(f"model must have parameters that require a gradient, got {type(model).__name__} without")
    inputs = tree_map_only(Tensor, Tensor.detach, example_input)
    with preserve_model_state(model, evaluate=False, freeze=False):
        for module in model.modules() if not model.training else ():
            module.training = True
        trace = _traced(model, inputs, parameters, {})
        wanted = {p: want for p in parameters.values() if (want := _every_fourth_filter(p)) is not None}
        some = _traced(model, inputs, parameters, wanted)
    forward, backward, rows = np.array(trace.forward), np.array(trace.backward), np.array(trace.needed, dtype=object)
    place, first = np.arange(len(forward)), np.arange(len(forward) + 1)[:, None]
    runs_again = (place >= first) | ~np.array(trace.is_reusable) | (np.array(trace.freed) <= first)
    own, quarter = trace.own_costs(), some.own_costs()
    single = set(trace.bits.values())
    return StepCosts(
        shapes={name: p.shape for name, p in parameters.items()},
        first_use=trace.first_use,
        second_forward=runs_again @ forward,
        backward=np.where([row in single for row in trace.needed], 0.0, backward),
        needed={name: (rows & bit).astype(bool) for name, bit in trace.bits.items()},
        own=own,
        filters={name: cost for name, cost in quarter.items() if cost < own[name]},
        base=float(forward.sum() + backward.sum()),
    )


def _traced(
    model: nn.Module, inputs: Any, parameters: Mapping[str, Tensor], wanted: Mapping[Tensor, WeightGradient]
) -> _Trace:
    """Run a forward and a backward; ``wanted``: the filters of which dW is computed, in layers that can."""
    layers, trace = FilterLayers(wanted), _Trace(parameters)
    with layers, trace:
        outputs = [tensor for tensor in tensors_in(call_model(model, inputs)) if tensor.requires_grad]
    if not outputs:
        raise ValueError("model must return a tensor that depends on its parameters, got none for example_input")
    with layers.narrowed(), trace.following(outputs):
        seeds = [torch.ones_like(tensor) for tensor in outputs]
        torch.autograd.grad(outputs, list(parameters.values()), seeds, allow_unused=True)
    return trace


def _every_fourth_filter(parameter: Tensor) -> WeightGradient | None:
    kept = torch.zeros_like(parameter, dtype=torch.bool)
    kept[::4] = True
    return weight_gradient(PackedMask.pack(kept), parameter, ascent="explicit", norm="masked")


def multiply_adds(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[float, float]:
    """Returns the multiply-adds of a matrix product or convolution, and the entries that another operation computes."""
    if count := flop_registry.get(func._overloadpacket):
        return count(*args, **kwargs, out_val=result) / 2, 0.0
    return 0.0, 0.0 if func.is_view else float(sum(tensor.numel() for tensor in tensors_in(result)))


def _cost(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    products, entries = multiply_adds(func, args, kwargs, result)
    return products + ENTRY * entries


class MultiplyAdds(TorchDispatchMode):
    """Counts multiply-adds of matrix products and convolutions, and one per entry that other functions compute.

    torch's FlopCounterMode also tracks modules by hooks on their tensors, which would keep activations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = self.others = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        products, others = multiply_adds(func, args, kwargs or {}, result)
        self.products += products
        self.others += others
        return result


class _Trace(TorchDispatchMode):
    """Notes the cost of each operation of a pass, how long its output is kept, and which gradients need it."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.forward: list[float] = []
        self.is_reusable: list[bool] = []  # as far as the operation and its output are concerned, while it is alive
        self.freed: list[float] = []  # the operation before which the output was freed
        self.first_use: dict[str, int] = {}
        self.backward: list[float] = []
        self.needed: list[int] = []  # by operation of the backward, the bits of parameters whose gradients need it
        self.bits = {name: 1 << column for column, name in enumerate(parameters)}
        self._parameters = parameters
        self._alive: dict[int, tuple[int, StorageWeakRef]] = {}  # by storage: the operation that made it
        self._leads_to: dict[Any, int] = {}  # by node of the graph, the parameters
        self._waiting: list[tuple[list[tuple[float, Any]], Any]] = []  # costs and outputs, inputs

    def own_costs(self) -> dict[str, float]:
        """Returns, by parameter, the cost of the operations that no other gradient needs."""
        costs: dict[int, float] = defaultdict(float)
        for cost, row in zip(self.backward, self.needed, strict=True):
            costs[row] += cost
        return {name: costs[bit] for name, bit in self.bits.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._leads_to:
            return self._run_forward(func, args, kwargs)
        result = func(*args, **kwargs)
        # Inputs and outputs are held until the node is done, so that no storage gets the address of another.
        self._waiting.append((_parts(func, args, kwargs, result), (args, kwargs)))
        return result

    def _run_forward(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Note what replay.py decides by: who reads parameters, and which outputs are alive and not written to."""
        place, kind, read = len(self.forward), operators.kind_of(func, args), _storages(args, kwargs)
        for storage, (maker, reference) in list(self._alive.items()):
            if reference.expired():
                del self._alive[storage]
                self.freed[maker] = min(place, self.freed[maker])
        for name, parameter in self._parameters.items() if not kind.is_view else ():
            if operators.storage_of(parameter) in read:
                self.first_use.setdefault(name, place)
        for storage in _storages(operators.written_by(kind, args, kwargs)).keys() & self._alive.keys():
            self.is_reusable[self._alive[storage][0]] = False
        result = func(*args, **kwargs)
        for storage, tensor in _storages(result).items():
            if storage not in read:
                self._alive[storage] = place, StorageWeakRef(tensor.untyped_storage())
        is_reusable = kind.is_plain and kind.makes and not (kind.written or kind.is_blank)
        self.is_reusable.append(is_reusable)
        self.freed.append(np.inf)
        self.forward.append(_cost(func, args, kwargs, result))
        return result

    @contextmanager
    def following(self, outputs: Sequence[Tensor]) -> Iterator[None]:
        """Around the backward of these outputs."""
        nodes = set(operators.nodes_of(tensor.grad_fn for tensor in outputs))
        leaves = {node for node in nodes if type(node).__name__ == "AccumulateGrad"}
        bits = {id(parameter): self.bits[name] for name, parameter in self._parameters.items()}
        self._leads_to = {node: bits.get(id(node.variable), 0) for node in leaves}
        for node in sorted(nodes - leaves, key=lambda node: node._sequence_nr()):  # made after those it leads to
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
                self.needed.append(row or self._leads_to[node])
                of_all |= self.needed[-1]
            for storage in _storages(inputs):
                needed[storage] |= of_all
        self._waiting.clear()


def _parts(func: Any, args: Any, kwargs: Any, result: Any) -> list[tuple[float, Any]]:
    """Returns the cost of an operation and what it made; of a convolution, separately for dX, dW and db."""
    if func is not torch.ops.aten.convolution_backward.default:
        return [(_cost(func, args, kwargs, result), result)]
    alone = ([True, False, False], [False, True, False], [False, False, True])
    made = [(mask, part) for mask, part in zip(alone, result, strict=True) if part is not None]
    return [(_cost(func, (*args[:-1], mask), kwargs, result), part) for mask, part in made]


def _storages(*trees: Any) -> dict[int, Tensor]:
    """Returns a tensor on each storage; those of sparse and nested tensors are left out."""
    return {operators.storage_of(tensor): tensor for tensor in tensors_in(trees) if operators.has_storage(tensor)}


def tensors_in(tree: Any) -> list[Tensor]:
    """Returns the tensors in tuples, lists and dictionaries, in order; torch's pytrees know only registered kinds."""
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]
