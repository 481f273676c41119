"""The first pass as torch sees it: its backward computes the gradients that the ascent needs, and no others.

``loss.backward()`` becomes ``loss.backward(inputs=needed)``: autograd then leaves out all other weight gradients and
every input gradient before the first perturbed layer. Any other differentiation is left alone. In a closure it runs
when the closure returns; should the closure look at a gradient before, the whole backward runs at that moment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from sparsesam.ascent.deferral import backward_context, is_harmless, why_at_once
from sparsesam.ascent.graph import has_compiled, is_for_single_use, is_reentrant, leaf_of, nodes_of
from sparsesam.ascent.layers import Switch
from sparsesam.ascent.plan import Plan
from sparsesam.ascent.prefix import Prefix
from sparsesam.ascent.tensors import memory_of, tensors_in

SINGLE_USE = (
    "a compiled part of the model frees its graph in backward; compile it with sparsesam.compile_blocks(model), or set "
    "torch._functorch.config.donated_buffer = False before it is compiled"
)


@dataclass
class _Backward:
    """A call of backward() that was not made yet."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    other_leaves: list[Tensor]  # not of the model: the user's own
    is_for_single_use: bool  # the graph must not be kept


class FirstPass(TorchFunctionMode):
    """Active while the first pass runs; afterwards it tells what the pass left out.

    ``in_closure``: the code that runs knows nothing of this, and may look at any gradient. Otherwise it is a block
    that says ``first_pass()``, and has only the gradients that the ascent needs.
    """

    def __init__(
        self,
        plan: Plan,
        prefix: Prefix,
        *,
        in_closure: bool,
        model_memory: frozenset[int | None],
        whole: str | None,
    ) -> None:
        super().__init__()
        self.plan, self.prefix, self.switch = plan, prefix, Switch()
        self.layers_called: set[int] = set()
        self.is_complete = True  # every gradient is there
        self.why_not: str | None = None  # the backward was not narrowed
        self.narrows = plan.is_partial and whole is None  # should nothing come between
        self.looked = False  # the closure went on after its backward in a way that may need its gradients
        self._narrow, self._in_closure = plan.is_partial, in_closure
        if whole is not None:
            self._widen(whole)
        self._model_memory = model_memory
        self._backwards = 0
        self._waiting: _Backward | None = None
        self._context = backward_context() if in_closure else ()
        self._grad_was_off = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._backwards and not is_harmless(func, kwargs):
            self.looked = True
            if self._waiting is not None:
                self._widen("the closure goes on after backward() in a way that may need its gradients")
                self._run_waiting()
        # While a part of the forward is traced (torch.cond), torch 2.6 can follow no other question than the first.
        if torch.compiler.is_compiling() or func in _NO_USE:
            return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(self, func, args, kwargs)
        self.prefix.require_unread(args, kwargs)
        if self.prefix.is_open and not self._is_plain_attribute(func, args):
            self._watch(args, kwargs)
        if not (torch.is_grad_enabled() or self.prefix.is_open):
            self._grad_was_off = True
        return func(*args, **kwargs)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the block this mode is on torch's stack, and never afterwards."""
        try:
            self.__enter__()
            yield
        finally:
            try:
                self._leave()
            except BaseException:  # Ctrl-C on the way
                self._leave()
                raise

    def _is_on_top(self) -> bool:
        return torch.overrides._get_current_function_mode() is self

    def _leave(self) -> None:
        if self._is_on_top():
            self.__exit__(None, None, None)

    def paused(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run what must not see this mode: compiled modules, which would be compiled once more for it."""
        if not self._is_on_top():
            return forward(*args, **kwargs)
        try:
            self._leave()
            return forward(*args, **kwargs)
        finally:
            if not self._is_on_top():
                self.__enter__()

    def give_up(self, reason: str) -> None:
        """Leave nothing out from here on."""
        self._widen(reason)
        self.prefix.drop(reason)

    def closure_returns(self) -> None:
        """Run the backward that waited for it."""
        if self._waiting is not None:
            self.paused(self._run_waiting)

    def finish(self) -> None:
        """The pass is over."""
        if self._backwards == 0:
            self.prefix.drop("no backward() was seen")
        self.prefix.check_values()

    # ---- before the first use of a perturbed weight ------------------------------------------------------

    def _watch(self, args: Any, kwargs: Any) -> None:
        if any(map(self._is_moved, tensors_in(args, kwargs))):
            self.prefix.close()
        elif kwargs.get("generator") is not None:
            self.prefix.fault_inside("it draws from a random generator of its own")

    @staticmethod
    def _is_plain_attribute(func: Any, args: Any) -> bool:
        """Reading a shape, a device or a flag is no use of a weight; reading a view of it is."""
        return getattr(func, "__name__", "") == "__get__" and not isinstance(func(*args), Tensor)

    def _is_moved(self, tensor: Tensor) -> bool:
        if id(tensor) in self.plan.moved:
            return True
        base = tensor._base
        if base is not None and id(base) in self.plan.moved:
            return True
        return not tensor.requires_grad and memory_of(tensor) in self.plan.moved_memory

    def _hand_out_memory(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Values may now change without torch's knowledge."""
        prefix, tensor = self.prefix, args[0]
        if isinstance(tensor, Tensor):
            memory = memory_of(tensor)
            if memory is not None and (memory in self._model_memory or memory in prefix.memory):
                prefix.drop("the memory of a tensor is given away (.data, numpy, data_ptr)")
            else:
                prefix.fault_inside("it gives the memory of a tensor away (.data, numpy, data_ptr)")
        return func(*args, **kwargs)

    def _add_hook(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The closure may see when hooks are called, and on what; reading ``grad_fn`` is the way to add some.

        torch reads it too, to see whether an output has one: DistributedDataParallel, and in torch 2.6 checkpoint().
        """
        reader = sys._getframe(2).f_globals.get("__name__")
        by_torch = reader in (DistributedDataParallel.__module__, checkpoint.__name__)
        if by_torch or (len(args) > 1 and _does_nothing(args[1])):
            return func(*args, **kwargs)
        if not args[0].is_leaf:
            self.prefix.drop("a hook is added to a value, or its graph is looked at (grad_fn)")
        if self._in_closure and self.plan.is_explicit:
            self._widen("a closure adds hooks, or looks at the graph (grad_fn)")
        return func(*args, **kwargs)

    # ---- differentiation ---------------------------------------------------------------------------------

    def _gradient(self, func: Any, args: Any, kwargs: Any) -> Any:
        """torch.autograd.grad: the user's own, in full."""
        self.prefix.drop("gradients are computed in other ways than by one loss.backward()")
        return func(*args, **kwargs)

    def _backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._backwards += 1
        if any(kwargs.get(key) for key in ("retain_graph", "create_graph", "inputs")) or len(args) > 2:
            self.give_up("backward() is called with arguments of its own")
        elif self._backwards == 2:
            self.prefix.drop("several backward passes: activations of the first are not kept")
        if self._backwards > 1 and self._in_closure:
            self.give_up("several backward passes in a closure")
        roots = tensors_in(args[0])
        last = [root.grad_fn for root in roots]
        nodes = list(nodes_of(last))
        self.prefix.require_closed_graphs(last)
        if self._narrow and self._grad_was_off and any(map(is_reentrant, nodes)):
            self.give_up("a reentrant checkpoint cannot be differentiated in part")
        leaves = (leaf_of(node) for node in nodes)
        others = [leaf for leaf in leaves if leaf is not None and id(leaf) not in self.plan.names]
        single_use = has_compiled() and any(map(is_for_single_use, nodes))
        self._waiting = _Backward(func, args, kwargs, others, single_use)
        if self._narrow and self._in_closure and self.plan.is_explicit:
            reason = why_at_once(roots, nodes, self.plan.needed)
            if backward_context() != self._context:
                reason = "backward() is called in a context of its own (autocast, anomaly detection)"
            if reason is None:
                return None
            self._widen(reason)
        return self._run_waiting()

    def _run_waiting(self) -> Any:
        call, self._waiting = self._waiting, None
        assert call is not None
        if call.is_for_single_use and self._must_keep_graph(call):
            self.give_up(SINGLE_USE)
        options = dict(call.kwargs)
        if self._must_keep_graph(call):
            options["retain_graph"] = True
        if not self._narrow:
            return call.func(*call.args, **options)
        self.is_complete = False
        self.switch.on = True
        try:
            return call.func(*call.args, **{**options, "inputs": [*self.plan.needed, *call.other_leaves]})
        finally:
            self.switch.on = False

    def _widen(self, reason: str) -> None:
        """Compute every gradient; the second pass may still use the graph again."""
        self.why_not = self.why_not or reason
        self._narrow = False

    def _must_keep_graph(self, call: _Backward) -> bool:
        """Whether nodes that run must keep what they saved.

        The second pass uses the graph of the prefix, which runs now only if gradients are needed of what does not
        move: nodes that do not run keep what they saved.
        """
        prefix_runs = not (self._narrow and self.plan.needs_only_moved) or bool(call.other_leaves)
        return prefix_runs and not self.prefix.is_empty


def unwatched(call: Callable[[], Any]) -> Any:
    """Run what a first pass need not see before its backward."""
    mode = torch.overrides._get_current_function_mode()
    return mode.paused(call) if isinstance(mode, FirstPass) and not mode._backwards else call()


def _does_nothing(hook: Any) -> bool:
    """Fabric adds a hook to every output, which acts only where its own backward() is required."""
    return (
        isinstance(hook, partial)
        and hook.func.__module__.endswith("fabric.wrappers")
        and (hook.func.__name__, hook.args, hook.keywords) == ("_backward_hook", (False,), {})
    )


def _attribute(name: str, access: str) -> Any:
    """The function that torch hands to a mode when an attribute of a tensor is read or written."""
    return getattr(getattr(Tensor, name), access)


_MEMORY = (Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.storage, Tensor.untyped_storage, Tensor.__dlpack__)
#: no use of a weight: its gradient, and switching gradients off
_NO_USE = frozenset((_attribute("grad", "__get__"), _attribute("grad", "__set__"), torch._C._set_grad_enabled))
_HOOKS = (
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.retain_grad,
    _attribute("grad_fn", "__get__"),
)

_HANDLERS: dict[Any, Callable[[FirstPass, Any, Any, Any], Any]] = {
    Tensor.backward: FirstPass._backward,
    torch.autograd.backward: FirstPass._backward,
    torch.autograd.grad: FirstPass._gradient,
    **dict.fromkeys(_HOOKS, FirstPass._add_hook),
    _attribute("data", "__get__"): FirstPass._hand_out_memory,
    _attribute("data", "__set__"): FirstPass._hand_out_memory,
    **dict.fromkeys(_MEMORY, FirstPass._hand_out_memory),
}
