"""The backward of a first pass, narrowed to the gradients that the ascent needs.

``loss.backward()`` becomes ``loss.backward(inputs=needed)``: autograd then leaves out all other weight gradients and
every input gradient before the first perturbed layer. A closure may read any gradient, so in a closure the call is
deferred until it returns. If the closure first does anything that could notice, the full backward runs at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from sparsesam.ascent.graph import (
    autocast_state,
    custom_function_name,
    has_compiled,
    is_for_single_use,
    leaf_of,
    nodes_of,
    tensors_in,
)
from sparsesam.ascent.layers import Switch
from sparsesam.ascent.plan import Plan
from sparsesam.ascent.prefix import Prefix
from sparsesam.ascent.survey import has_gradient_hooks
from sparsesam.distributed.agreement import is_distributed

SINGLE_USE = (
    "a compiled part of the model frees its graph in backward; compile it with sparsesam.compile_blocks(model), or set "
    "torch._functorch.config.donated_buffer = False before it is compiled"
)


class NarrowedBackward:
    """Replaces ``backward()`` in one first pass.

    ``in_closure``: the surrounding code is a plain closure, which may read any gradient. ``why_full``: why every
    gradient is computed; None: the backward is narrowed, as long as nothing prevents it.
    """

    def __init__(
        self, modules: Sequence[nn.Module], plan: Plan, prefix: Prefix, *, in_closure: bool, why_full: str | None
    ) -> None:
        self.why_full = why_full
        self.is_complete = True  # every gradient was computed
        self.closure_continues = False  # calls functions after its backward that may need the gradients
        self.calls = 0
        self.switch = Switch()  # for the layers that compute only a part of their gradient
        self._modules, self._plan, self._prefix, self._in_closure = modules, plan, prefix, in_closure
        self._deferred: Callable[..., Any] | None = None
        self._training: list[tuple[nn.Module, bool]] = []  # modules and their mode at the deferred call
        self._other_leaves: list[Tensor] = []  # leaf tensors outside the model
        self._is_for_single_use = False  # torch rejects retain_graph=True
        self._context = _backward_context() if in_closure else ()

    @property
    def is_narrow(self) -> bool:
        return self._plan.is_partial and self.why_full is None

    def use_full(self, reason: str) -> None:
        """Compute every gradient; the second pass may still reuse the graph."""
        self.why_full = self.why_full or reason

    def disable(self, reason: str) -> None:
        """Leave nothing out from here on."""
        self.use_full(reason)
        self._prefix.drop(reason)

    def before_call(self, function: Any, kwargs: Mapping[str, Any]) -> None:
        """After the first backward: run it, if deferred, before a torch function that may need its gradients."""
        if not _is_harmless(function, kwargs):
            self.closure_continues = True
            if self._deferred is not None:
                self.use_full("after backward(), the closure calls functions that may need the gradients")
                self.run_deferred()

    def __call__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, grad_was_off: bool) -> Any:
        """Handle ``backward()``. ``grad_was_off``: a perturbed weight may have been used without grad mode."""
        self.calls += 1
        if any(kwargs.get(key) for key in ("retain_graph", "create_graph", "inputs")) or len(args) > 2:
            self.disable("backward() is called with retain_graph, create_graph or inputs")
        elif self.calls == 2:
            self._prefix.drop("several backward passes: activations of the first are not kept")
        if self.calls > 1 and self._in_closure:
            self.disable("several backward passes in a closure")
        losses = tensors_in(args[0])
        roots = [loss.grad_fn for loss in losses]
        nodes = list(nodes_of(roots))
        self._prefix.require_no_side_graphs(roots)
        is_reentrant = any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes)
        if self.is_narrow and grad_was_off and is_reentrant:
            self.disable("a reentrant checkpoint cannot be differentiated in part")
        leaves = (leaf_of(node) for node in nodes)
        self._other_leaves = [leaf for leaf in leaves if leaf is not None and id(leaf) not in self._plan.names]
        self._is_for_single_use = has_compiled() and any(map(is_for_single_use, nodes))
        self._deferred = partial(function, *args, **kwargs)
        if self.is_narrow and self._in_closure and self._plan.is_explicit:
            reason = self._why_not_deferred(losses, nodes)
            if reason is None:
                self._training = [(module, _is_training(module)) for module in self._modules]
                return None
            self.use_full(reason)
        return self.run_deferred()

    def run_deferred(self) -> Any:
        """Run the deferred call, if there is one, in the training modes of its time: checkpoints run forwards again."""
        call, self._deferred = self._deferred, None
        if call is None:
            return None
        changed = [(module, was) for module, was in self._training if _is_training(module) != was]
        for module, was in changed:
            module.training = was
        try:
            return self._run(call)
        finally:
            self._other_leaves = []
            for module, was in changed:
                module.training = not was

    def _run(self, call: Callable[..., Any]) -> Any:
        if self._is_for_single_use and self._must_keep_graph:
            self.disable(SINGLE_USE)
        options: dict[str, Any] = {"retain_graph": True} if self._must_keep_graph else {}
        inputs = [one for one in (*self._plan.needed, *self._other_leaves) if one.requires_grad]
        if not inputs:
            self.use_full("no perturbed parameter requires grad any more")
        if not self.is_narrow:
            return call(**options)
        self.is_complete = False
        self.switch.on = True
        try:
            return call(**options, inputs=inputs)
        finally:
            self.switch.on = False

    @property
    def _must_keep_graph(self) -> bool:
        """Whether the backward needs retain_graph=True.

        The second pass reuses the graph of the prefix. This backward runs through it only if it needs gradients of
        weights that do not move; nodes that do not run keep their saved tensors anyway.
        """
        prefix_runs = not (self.is_narrow and self._plan.needs_only_moved) or bool(self._other_leaves)
        return prefix_runs and not self._prefix.is_empty

    def _why_not_deferred(self, losses: list[Tensor], nodes: list[Any]) -> str | None:
        """Returns why a closure could notice a deferred backward before it returns; None: it could not."""
        if not all(loss.requires_grad for loss in losses):
            return "a loss does not require grad"  # torch raises an error
        if any(map(has_gradient_hooks, self._plan.needed)):
            return "a gradient hook is registered on a perturbed parameter"
        for node in nodes:
            function = custom_function_name(node)
            if function is not None:
                return f"the closure may see what the backward of {function} does"
        # Collectives write to a loss in place without raising its version.
        if is_distributed() and any(hasattr(loss.grad_fn, "_saved_result") for loss in losses):
            return "the loss is saved in its own graph, and ranks may average it in place"
        if _backward_context() != self._context:
            return "backward() is called in another context than the closure (autocast, anomaly detection)"
        return None


def _is_training(module: nn.Module) -> bool:
    return bool(getattr(module, "training", False))  # frozen ScriptModules lack this attribute


def _backward_context() -> tuple[Any, ...]:
    """Returns the global settings that a backward depends on."""
    cudnn = torch.backends.cudnn
    return (
        autocast_state(),
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        torch.cuda.is_initialized() and (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        _get_current_dispatch_mode(),
    )


_METHODS = (
    "item tolist detach clone cpu to float double half int long bool size dim numel __len__ __float__ __int__ __bool__ "
    "__format__ __repr__ add sub mul div neg __radd__ __rsub__ __rmul__ __rdiv__ sqrt exp log abs "
    "eq ne __eq__ __ne__ lt le gt ge sum mean max min argmax argmin topk softmax isnan isfinite isinf "
    "__getitem__ view view_as reshape flatten squeeze unsqueeze expand_as t type"
)
_FUNCTIONS = "isnan isfinite isinf is_tensor stack cat argmax topk softmax sum mean max exp sqrt eq"
_ATTRIBUTES = ("shape", "device", "dtype", "requires_grad", "is_leaf", "ndim", "layout", "is_cuda")

#: functions that neither change a tensor nor depend on a backward: those used to log a loss or an accuracy
_HARMLESS: frozenset[Any] = frozenset(
    (
        *(getattr(Tensor, name) for name in _METHODS.split()),
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
        *(getattr(torch, name) for name in _FUNCTIONS.split()),
        torch._C._set_grad_enabled,  # torch.no_grad()
    )
)


def _is_harmless(function: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may run before a deferred backward."""
    return function in _HARMLESS and kwargs.get("out") is None
