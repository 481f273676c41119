"""Reuses, in the second pass, the outputs of modules that ran before the first perturbed weight, graph included.

In the first pass, each outermost call of a module without perturbed weights is recorded, until a perturbed weight is
used. In the second pass such a call returns its recorded output if everything that the output depends on is the same:
inputs, parameters, buffers, attributes, flags, random numbers. If anything differs, the module runs.

The graph of the output still exists: the first backward did not run through it, or retained it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from sparsesam.ascent.graph import (
    autocast_state,
    custom_function_name,
    is_transformed,
    leaf_of,
    memory_of,
    nodes_of,
    tensors_in,
)
from sparsesam.ascent.module_state import Inputs, ModuleState, unsupported_leaf
from sparsesam.ascent.plan import Plan
from sparsesam.ascent.replaced_calls import is_compiled_in_place
from sparsesam.ascent.survey import Survey, has_forward_hooks
from sparsesam.utils.restore import statistics_of
from sparsesam.utils.rng import RNGSnapshot, RNGState, other_generators, same_state

Agree = Callable[[bool], bool]
#: multiplications below which a module is not worth a check of 50 microseconds
SMALLEST_WORK = 3_000_000
#: nodes of the graph between two modules that are searched before the search gives up
_LONGEST_WAY = 2000


@dataclass(eq=False)
class _Record:
    module: nn.Module
    output: Any
    inputs: Inputs
    state: ModuleState
    context: tuple[Any, ...]
    drew: tuple[RNGSnapshot, RNGSnapshot] | None
    made_between: tuple[int, int]  # sequence numbers of its graph's nodes
    number: int  # of the call, among those of this module
    statistics: list[Tensor]  # updated by the call

    def __post_init__(self) -> None:
        self.tensors = _tensors(self.output)
        self.versions = [tensor._version for tensor in self.tensors]
        self.first_nodes = {leaf.grad_fn for leaf in self.inputs.leaves if isinstance(leaf, Tensor)}
        self.last_nodes = [tensor.grad_fn for tensor in self.tensors]

    def why_changed(self, exposed: set[int]) -> str | None:
        """Returns why the output may not be what the module returned; None: it is. ``exposed`` is memory."""
        if any(map(_was_touched, self.tensors, self.versions)):
            return "an output of a module is written to in place, or has a hook"
        held = [*self.tensors, *self.inputs.leaves, *self.state.values, *self.statistics] if exposed else []
        if any(memory_of(one) in exposed for one in held if isinstance(one, Tensor)):
            return "the memory of a tensor is accessed directly (.data, numpy, data_ptr)"
        return None


class Prefix:
    """The recorded calls of one step, in call order."""

    def __init__(self, found: Survey, plan: Plan, rng: RNGState, agree: Mapping[nn.Module, Agree]) -> None:
        self.modules = found.clean  # each with all of its submodules
        self._of_torch = found.of_torch  # torch's own, which draw only from torch's generators: number of weights
        self.is_open = bool(self.modules)  # no perturbed weight has been used yet
        self.reused: set[str] = set()
        self.why_not: str | None = None
        self._trainable, self._moved, self._rng, self._agree = plan.names, plan.moved, rng, agree
        self._records: list[_Record] = []
        self._exposed: dict[int, StorageWeakRef] = {}  # memory that may change without torch's knowledge
        self._statistics: set[int | None] = set()  # memory of the running statistics of recorded modules
        self._ends: set[Any] = set()  # nodes of reused outputs
        self._inside = False
        self._calls: Counter[nn.Module] = Counter()  # outermost calls in this pass
        self._own: set[int | None] = set()  # memory of the running statistics of the current module
        self._small: set[nn.Module] = set()  # modules called that are too small to record
        self._small_work = 0.0  # their multiplications; inf once a larger one is called
        self._refusal: str | None = None
        self._others: tuple[Any, bytes] | None = None  # states before the first module that may draw from them

    # ---- first pass --------------------------------------------------------------------------------------

    def record(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self.is_open or self._inside:
            return forward(*args, **kwargs)
        self._calls[module] += 1
        if self._is_small(module, args) or _is_in_other_run() or self._has_hooks_inside(module):
            return forward(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            inputs = Inputs.of(args, kwargs)
            state, context, before = ModuleState(module), _context(), self._rng.read()
            if module not in self._of_torch:
                self._others = self._others or other_generators()
            statistics = statistics_of(self.modules[module])
            self._own = set(map(memory_of, statistics)) - {None}
            number = _next_sequence_nr()
        self._inside, self._refusal = True, None
        try:
            output = forward(*args, **kwargs)
        finally:
            self._inside = False
        with torch._C.DisableTorchFunction():
            reason = self._why_not_recorded(inputs, state, output)
            if reason is not None:
                self.note(f"{type(module).__name__}: {reason}")
            elif self.is_open and inputs is not None:
                after = self._rng.read()
                drew = None if same_state(before, after) else (before, after)
                numbers = (number, _next_sequence_nr())
                call = self._calls[module]
                self._records.append(_Record(module, output, inputs, state, context, drew, numbers, call, statistics))
                self._statistics |= self._own
        return output

    def _has_hooks_inside(self, module: nn.Module) -> bool:
        """Whether forward hooks would not be called if the module did not run."""
        within = self.modules[module]
        own_run_outside = not is_compiled_in_place(module)
        return any(map(has_forward_hooks, within[own_run_outside:]))

    def _is_small(self, module: nn.Module, args: tuple[Any, ...]) -> bool:
        """Whether running the module takes no longer than checking whether its output can be reused."""
        weights, work = self._of_torch.get(module), math.inf
        if weights is not None and len(args) == 1 and isinstance(args[0], Tensor):
            with torch._C.DisableTorchFunction():
                work = args[0].numel() * (weights + 1)  # an upper bound on multiplications
        if work >= SMALLEST_WORK:
            self._small_work = math.inf
            return False
        self._small.add(module)
        self._small_work += work
        return True

    def is_too_small(self, plan: Plan) -> bool:
        """Whether all that the pass could leave out takes less time than finding out."""
        if self.why_not is not None or not self._small or self._small_work >= SMALLEST_WORK:
            return False
        left_out = plan.names.keys() - set(map(id, plan.needed))
        return left_out <= {id(parameter) for module in self._small for parameter in module.parameters()}

    def _why_not_recorded(self, inputs: Inputs | None, state: ModuleState, output: Any) -> str | None:
        if inputs is None:
            return "an argument cannot be compared between the passes (Hugging Face models: pass use_cache=False)"
        if not inputs.are_unchanged:
            return "it writes to its input in place"
        unsupported = unsupported_leaf(output)
        if unsupported is not None:
            return f"its output holds a {unsupported}"
        return self._refusal or state.difference()

    def require_no_side_graphs(self, last: list[Any]) -> None:
        """Drop the records if gradients enter or leave a recorded module other than by its inputs and outputs.

        An example is an auxiliary loss that a module puts into a global list. ``last`` are the nodes of the losses.
        """
        records = self._records
        if not records:
            return
        bounds = sorted(number for record in records for number in record.made_between)
        ends = {node for record in records for node in record.last_nodes}
        is_closed = not any(bisect_right(bounds, node._sequence_nr()) % 2 for node in nodes_of(last, ends))
        for record in records:
            known = set(map(id, (*record.state.values, *record.inputs.leaves)))
            leaves = (leaf_of(node) for node in nodes_of(record.last_nodes, record.first_nodes))
            is_closed = is_closed and all(leaf is None or id(leaf) in known for leaf in leaves)
        if not is_closed:
            self.drop("a module passes values with gradient in other ways than by its input and output")

    def close(self) -> None:
        """Stop recording, because a perturbed weight is used."""
        if self.is_open and self._others is not None and self._others != other_generators():
            self.drop("random numbers of Python or numpy are drawn")
        self.is_open = False

    def refuse_current_call(self, reason: str) -> None:
        """Do not record the current module, because it does something that cannot be left out."""
        if self._inside:
            self._refusal = self._refusal or reason

    def expose(self, tensor: Any) -> None:
        """Reuse neither what holds a tensor whose memory is accessed directly, nor the current module."""
        self.refuse_current_call("it accesses the memory of a tensor directly (.data, numpy, data_ptr)")
        memory = memory_of(tensor) if isinstance(tensor, Tensor) else None
        if memory is not None:
            self._exposed[memory] = StorageWeakRef(tensor.untyped_storage())  # the address may be used again
            self.require_statistics_unread(None, tensor)

    def require_statistics_unread(self, function: Any, *arguments: Any) -> None:
        """Drop the records if other code reads running statistics, which a reused module does not update again."""
        own = self._own if self._inside else set[int | None]()
        if not (self._statistics or own):
            return
        seen = _read_by(function, *arguments) if self._inside else arguments
        read = set(map(memory_of, tensors_in(*seen)))
        if not own.isdisjoint(read):
            self.refuse_current_call("it reads its running statistics")
        if not self._statistics.isdisjoint(read):
            self.drop("normalization statistics are read outside of their layer")

    def drop(self, reason: str) -> None:
        """Drop all records, because graphs or values may have changed."""
        self.note(reason)
        self._records, self._statistics, self.is_open = [], set(), False

    def note(self, reason: str) -> None:
        if self.modules:
            self.why_not = self.why_not or reason

    @property
    def is_empty(self) -> bool:
        return not self._records

    @property
    def is_asked(self) -> bool:
        """Whether the second pass must check calls: outputs may be reused, or other ranks wait for an answer."""
        return bool(self._agree) or not self.is_empty

    def release(self) -> None:
        """Free the activations; keep only what the report needs."""
        self._records, self._ends = [], set()

    # ---- second pass -------------------------------------------------------------------------------------

    def check_values(self) -> None:
        """Between the passes, drop outputs that may have changed since their module returned."""
        self.close()
        self._calls.clear()
        exposed = {memory for memory, storage in self._exposed.items() if not storage.expired()}
        reasons = [record.why_changed(exposed) for record in self._records]
        for reason in filter(None, reasons):
            self.note(reason)
        self._records = [record for record, reason in zip(self._records, reasons, strict=True) if reason is None]

    def reuse(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        self._calls[module] += 1
        if _is_in_other_run():
            return forward(*args, **kwargs)
        number = self._calls[module]
        record = next((one for one in self._records if one.module is module and one.number == number), None)
        reason: str | None = "it was not recorded"
        if record is not None:
            self._records.remove(record)
            reason = self._difference(record, args, kwargs)
        agree = self._agree.get(module)
        if agree is not None and not agree(reason is None):
            reason = reason or "another rank computes it"
        if record is None or reason is not None:
            if record is not None:
                self.note(f"{type(module).__name__}: {reason}")
            if agree is None and self._has_hooks_inside(module):  # modules in it were recorded
                return forward(*args, **kwargs)
            self._inside = True
            try:
                return forward(*args, **kwargs)
            finally:
                self._inside = False
        if record.drew is not None:
            self._rng.write(record.drew[1])
        for one in self.modules[module]:
            self.reused.update(self._trainable[id(p)] for p in one._parameters.values() if id(p) in self._trainable)
        output = _alias(record.output) if isinstance(record.output, Tensor) else tree_map(_alias, record.output)
        self._ends.update(tensor.grad_fn for tensor in _tensors(output))
        return output

    def _difference(self, record: _Record, args: Any, kwargs: Any) -> str | None:
        inputs = Inputs.of(args, kwargs)
        if inputs is None or inputs.structure != record.inputs.structure or _context() != record.context:
            return "the structure of its arguments, grad mode or autocast differs"
        if record.drew is not None and not same_state(self._rng.read(), record.drew[0]):
            return "it draws different random numbers"
        reason = record.state.difference()
        if reason is not None:
            return reason
        if not record.inputs.are_unchanged or not all(map(self._same, inputs.leaves, record.inputs.leaves)):
            return "its input differs"
        return "a hook is registered inside" if self._has_hooks_inside(record.module) else None

    def _same(self, now: Any, then: Any) -> bool:
        if now is then:
            return True
        if not isinstance(now, Tensor):
            return type(now) is type(then) and bool(now == then)
        if not isinstance(then, Tensor) or (now.shape, now.dtype, now.device) != (then.shape, then.dtype, then.device):
            return False
        if now.requires_grad != then.requires_grad or not self._leads_only_here(now):
            return False
        # Reused outputs arrive as views; comparing their values would synchronize with an accelerator.
        return _is_same_memory(now, then) or torch.equal(now, then)

    def _leads_only_here(self, tensor: Tensor) -> bool:
        """Whether its gradient flows only into reused outputs and unperturbed weights of the model."""
        if not tensor.requires_grad:
            return True
        if tensor.is_leaf:  # a leaf outside the model
            return False
        for count, node in enumerate(nodes_of([tensor.grad_fn], self._ends)):
            leaf = leaf_of(node)
            is_other = leaf is not None and (id(leaf) not in self._trainable or id(leaf) in self._moved)
            # A custom autograd.Function may have another backward than in the first pass.
            if is_other or count > _LONGEST_WAY or custom_function_name(node) is not None:
                return False
        return True


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):  # tree_leaves takes longer than a small layer
        return [output]
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _alias(leaf: Any) -> Any:
    """Returns a new tensor for the second pass, so that hooks and attributes of the two passes stay separate."""
    return leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf


def _is_same_memory(left: Tensor, right: Tensor) -> bool:
    if left.layout is not torch.strided or right.layout is not torch.strided:
        return False
    if not torch._C._is_alias_of(left, right):  # type: ignore[attr-defined]
        return False
    return (left.storage_offset(), left.stride()) == (right.storage_offset(), right.stride())


def _was_touched(tensor: Tensor, version: int) -> bool:
    return tensor._version != version or bool(tensor._backward_hooks) or tensor.retains_grad


def _read_by(function: Any, *arguments: Any) -> tuple[Any, ...]:
    """Returns the arguments whose values a function of a module reads; not running statistics that it only updates."""
    name = getattr(function, "__name__", "")
    if function in (F.batch_norm, F.instance_norm):
        args, kwargs = arguments
        key, default = ("training", False) if function is F.batch_norm else ("use_input_stats", True)
        if args[5] if len(args) > 5 else kwargs.get(key, default):
            return args[:1], args[3:], {key: one for key, one in kwargs.items() if not key.startswith("running_")}
    elif name == "__float__" or function is torch.batch_norm_gather_stats_with_counts:
        return ()  # a layer with momentum=None reads its number of batches
    elif name.endswith("_") and not name.endswith("__") and arguments and arguments[0]:
        return arguments[0][1:], *arguments[1:]  # in place
    return arguments


def _next_sequence_nr() -> int:
    """Returns the sequence number of the next autograd node on this thread."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def _context() -> tuple[Any, ...]:
    """Returns the global settings that a forward depends on."""
    return torch.is_grad_enabled(), autocast_state()


def _is_in_other_run() -> bool:
    """Whether the call is in a checkpointed region, which runs again in the backward, or in a transform."""
    in_backward = torch._C._current_graph_task_id() != -1
    return in_backward or _saved_tensor_hooks() or is_transformed()


def _saved_tensor_hooks() -> bool:
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("sparsesam checks for active hooks"):
            return False
    except RuntimeError:
        return True
