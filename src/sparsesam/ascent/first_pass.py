"""The first pass as torch sees it: its backward computes the gradients that the ascent needs, and no others.

``loss.backward()`` becomes ``loss.backward(inputs=needed)``: autograd then leaves out all other weight gradients and
every input gradient before the first perturbed layer. Any other differentiation is left alone. A closure that looks
at a gradient afterwards finds all of them: the rest is computed then, from the graph that is kept until it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sparsesam.ascent.graph import has_compiled, is_for_single_use, is_reentrant, nodes_of, roots_of
from sparsesam.ascent.layers import Switch
from sparsesam.ascent.plan import Plan
from sparsesam.ascent.prefix import Prefix, in_backward
from sparsesam.ascent.tensors import memory_of, tensors_in

SINGLE_USE = (
    "a compiled part of the model frees its graph in backward; compile it with sparsesam.compile_blocks(model), or set "
    "torch._functorch.config.donated_buffer = False before it is compiled"
)

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class FirstPass(TorchFunctionMode):
    """Active while the first pass runs; afterwards it tells what the pass left out.

    ``in_closure``: the code that runs knows nothing of this, and may look at any gradient. Otherwise it is a block
    that says ``first_pass()``, and has only the gradients that the ascent needs.
    """

    def __init__(
        self,
        plan: Plan,
        prefix: Prefix | None,
        *,
        in_closure: bool,
        model_memory: frozenset[int | None],
        before_calls: Callable[[], bool] | None,
    ) -> None:
        super().__init__()
        self.plan, self.prefix, self.switch = plan, prefix, Switch()
        self.layers_called: set[int] = set()
        self.is_complete = True  # every gradient is there
        self.why_not: str | None = None  # the backward was not narrowed
        self._narrow, self._in_closure = plan.is_partial, in_closure
        self._model_memory = model_memory
        self._before_calls = before_calls
        self._backwards = 0
        self._pending: Call | None = None
        self._grad_was_off = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # a part of the forward is being traced (torch.cond)
            return func(*args, **kwargs)
        if self._before_calls is not None and self._before_calls():
            self._before_calls = None
            self.give_up("the model was wrapped in DistributedDataParallel after the optimizer was made")
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(self, func, args, kwargs)
        if self.prefix is not None:
            self.prefix.require_unread(args, kwargs)
            if self.prefix.is_open and not self._is_plain_attribute(func, args):
                self._watch(args, kwargs)
        if not torch.is_grad_enabled() and (self.prefix is None or not self.prefix.is_open):
            self._grad_was_off = True
        return func(*args, **kwargs)

    def paused(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run what must not see this mode: compiled modules, which would be compiled once more for it."""
        if torch.overrides._get_current_function_mode() is not self:
            return forward(*args, **kwargs)
        self.__exit__(None, None, None)
        try:
            return forward(*args, **kwargs)
        finally:
            self.__enter__()

    def give_up(self, reason: str) -> None:
        """Leave nothing out from here on."""
        self.why_not = self.why_not or reason
        self._narrow = False
        if self.prefix is not None:
            self.prefix.drop(reason)

    def finish(self) -> None:
        """The pass is over: let go of its graph."""
        self._pending = None
        if self.prefix is not None:
            if self._backwards == 0:
                self.prefix.drop("no backward() was seen")
            self.prefix.check_values()

    # ---- before the first use of a perturbed weight ------------------------------------------------------

    def _watch(self, args: Any, kwargs: Any) -> None:
        assert self.prefix is not None
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
        if prefix is not None and isinstance(tensor, Tensor):
            if memory_of(tensor) in self._model_memory or prefix.holds(tensor):
                prefix.drop("the memory of a tensor is given away (.data, numpy, data_ptr)")
            else:
                prefix.fault_inside("it gives the memory of a tensor away (.data, numpy, data_ptr)")
        return func(*args, **kwargs)

    def _look_at_graph(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.prefix is not None and self.prefix.holds(args[0]):
            self.prefix.drop("the graph of an output is looked at (grad_fn)")
        return func(*args, **kwargs)

    # ---- differentiation ---------------------------------------------------------------------------------

    def _gradient(self, func: Any, args: Any, kwargs: Any) -> Any:
        """torch.autograd.grad: the user's own, in full."""
        if self.prefix is not None:
            self.prefix.drop("gradients are computed in other ways than by one loss.backward()")
        return func(*args, **kwargs)

    def _backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._backwards += 1
        if any(kwargs.get(key) for key in ("retain_graph", "create_graph", "inputs")) or len(args) > 2:
            self.give_up("backward() is called with arguments of its own")
        elif self._backwards == 2 and self.prefix is not None:
            self.prefix.drop("several backward passes: activations of the first are not kept")
        if self._backwards > 1 and self._in_closure:
            self._complete()
            self.give_up("several backward passes in a closure")
        if self._narrow and self._grad_was_off and any(map(is_reentrant, nodes_of(roots_of(args)))):
            self.give_up("a reentrant checkpoint cannot be differentiated in part")
        keep = self._keeps_graph
        if keep and has_compiled() and any(map(is_for_single_use, nodes_of(roots_of(args)))):
            self.give_up(SINGLE_USE)
            keep = False
        if not self._narrow:
            return func(*args, **({**kwargs, "retain_graph": True} if keep else kwargs))
        self.is_complete = False
        self.switch.on = True
        try:
            result = func(*args, **{**kwargs, "inputs": self.plan.needed, "retain_graph": keep})
        finally:
            self.switch.on = False
        if self._in_closure and self._can_complete:
            self._pending = (func, args, kwargs)
        return result

    @property
    def _keeps_graph(self) -> bool:
        """Whether nodes that run must keep what they saved.

        A closure may look at more gradients before it returns. The second pass uses the graph of the prefix, which
        runs now only if gradients of unperturbed weights are needed: nodes that do not run keep what they saved.
        """
        if self._narrow and self._in_closure and self._can_complete:
            return True
        return (
            self.prefix is not None and not self.prefix.is_empty and not (self._narrow and self.plan.needs_only_moved)
        )

    @property
    def _can_complete(self) -> bool:
        """Whether gradients that were left out have a meaning; what passed through masked weights cannot be undone."""
        return not (self.plan.blocking or any(want.implicit for want in self.plan.sliced.values()))

    def _look_at_gradient(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not in_backward():
            self._complete()
        return func(*args, **kwargs)

    def _complete(self) -> None:
        """Compute the gradients that were left out: of other leaves, and of the other filters."""
        if self._pending is None:
            return
        (func, args, kwargs), self._pending = self._pending, None
        done = {id(parameter) for parameter in self.plan.needed}
        found = (getattr(node, "variable", None) for node in nodes_of(roots_of(args)))
        leaves = {id(leaf): leaf for leaf in found if leaf is not None}
        rest = [leaf for key, leaf in leaves.items() if key not in done]
        if rest:
            func(*args, **{**kwargs, "inputs": rest, "retain_graph": True})
        for key, want in self.plan.sliced.items():
            if key in leaves and want.rows is not None:
                self._complete_rows(leaves[key], want.rows, func, args, kwargs)
        self.is_complete = True

    def _complete_rows(self, weight: Tensor, rows: Tensor, func: Any, args: Any, kwargs: Any) -> None:
        before = weight.grad
        weight.grad = None
        func(*args, **{**kwargs, "inputs": [weight], "retain_graph": True})
        whole: Tensor | None = weight.grad
        if whole is None or before is None:
            return
        with torch.no_grad():
            weight.grad = before.add_(whole.index_fill_(0, rows, 0))


def _attribute(name: str, access: str) -> Any:
    """The function that torch hands to a mode when an attribute of a tensor is read or written."""
    return getattr(getattr(Tensor, name), access)


_MEMORY = (Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.storage, Tensor.untyped_storage, Tensor.__dlpack__)

_HANDLERS: dict[Any, Callable[[FirstPass, Any, Any, Any], Any]] = {
    Tensor.backward: FirstPass._backward,
    torch.autograd.backward: FirstPass._backward,
    torch.autograd.grad: FirstPass._gradient,
    _attribute("grad", "__get__"): FirstPass._look_at_gradient,
    _attribute("grad", "__set__"): FirstPass._look_at_gradient,
    _attribute("grad_fn", "__get__"): FirstPass._look_at_graph,
    _attribute("data", "__get__"): FirstPass._hand_out_memory,
    _attribute("data", "__set__"): FirstPass._hand_out_memory,
    **dict.fromkeys(_MEMORY, FirstPass._hand_out_memory),
}
