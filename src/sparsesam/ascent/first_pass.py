"""Observes the torch functions called in the first pass, to decide what can be left out and what can be reused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from sparsesam.ascent.graph import memory_of, tensors_in
from sparsesam.ascent.narrowed_backward import NarrowedBackward
from sparsesam.ascent.plan import Plan
from sparsesam.ascent.prefix import Prefix


class FirstPass(TorchFunctionMode):
    """Active while the first pass runs; afterwards it records what the pass left out.

    ``averages``: under DistributedDataParallel, gradients are averaged after the pass and not in its backward.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        plan: Plan,
        prefix: Prefix,
        *,
        in_closure: bool,
        why_full: str | None,
    ) -> None:
        super().__init__()
        self.plan, self.prefix = plan, prefix
        self.backward = NarrowedBackward(modules, plan, prefix, in_closure=in_closure, why_full=why_full)
        self.averages = self.backward.is_narrow
        self.layers_called: set[int] = set()
        self._in_closure = in_closure
        self._grad_was_off = False  # grad mode was off while a perturbed weight may have been used

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # While a part of the forward is traced (torch.cond), torch 2.6 cannot trace any check but this one.
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if self.backward.calls:
            self.backward.before_call(func, kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(self, func, args, kwargs)
        # Reading an attribute does not use a weight's values; a view (.T) is noticed where it is used.
        if func is torch._C._set_grad_enabled or getattr(func, "__name__", "") in ("__get__", "__set__"):
            return func(*args, **kwargs)
        self.prefix.require_statistics_unread(func, args, kwargs)
        if self.prefix.is_open:
            self._watch(args, kwargs)
        if not (torch.is_grad_enabled() or self.prefix.is_open):
            self._grad_was_off = True
        return func(*args, **kwargs)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the block, and only there, this mode is on torch's mode stack."""
        try:
            self.__enter__()
            yield
        finally:
            try:
                self._leave()
            except BaseException:  # Ctrl-C while leaving
                self._leave()
                raise

    def _is_on_top(self) -> bool:
        return torch.overrides._get_current_function_mode() is self

    def _leave(self) -> None:
        if self._is_on_top():
            self.__exit__(None, None, None)

    def paused(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a call without this mode: a compiled module would be recompiled for it."""
        if not self._is_on_top():
            return forward(*args, **kwargs)
        try:
            self._leave()
            return forward(*args, **kwargs)
        finally:
            if not self._is_on_top():
                self.__enter__()

    def closure_returns(self) -> None:
        """Run the deferred backward, which this mode need not observe."""
        self._leave()
        self.backward.run_deferred()

    def finish(self) -> None:
        """End the pass."""
        if self.backward.calls == 0:
            self.prefix.drop("no backward() was seen")
        self.prefix.check_values()

    # ---- what the pass calls -----------------------------------------------------------------------------

    def _watch(self, args: Any, kwargs: Any) -> None:
        if any(map(self._is_moved, tensors_in(args, kwargs))):
            self.prefix.close()
        elif kwargs.get("generator") is not None:
            self.prefix.refuse_current_call("it draws from its own random generator")

    def _is_moved(self, tensor: Tensor) -> bool:
        if id(tensor) in self.plan.moved:
            return True
        base = tensor._base
        if base is not None and id(base) in self.plan.moved:
            return True
        return not tensor.requires_grad and memory_of(tensor) in self.plan.moved_memory

    def _on_backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.backward(func, args, kwargs, grad_was_off=self._grad_was_off)

    def _on_grad(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run torch.autograd.grad in full, as the user asked for."""
        self.prefix.drop("gradients are computed by torch.autograd.grad, not only by one loss.backward()")
        return func(*args, **kwargs)

    def _on_memory_access(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Reuse nothing that may now change without torch's knowledge."""
        self.prefix.expose(args[0])
        result = func(*args, **kwargs)
        self.prefix.expose(args[0])  # .data may have been assigned
        return result

    def _on_hook(self, func: Any, args: Any, kwargs: Any) -> Any:
        """In a closure, run the full backward at once: hooks show when they are called, and with which gradients.

        Reading ``grad_fn`` counts too, because hooks can be added to it. torch itself reads it to see whether an output
        has one, in DistributedDataParallel and in torch 2.6's checkpoint().
        """
        reader = sys._getframe(2).f_globals.get("__name__")
        by_torch = reader in (DistributedDataParallel.__module__, checkpoint.__name__)
        if by_torch or (len(args) > 1 and _does_nothing(args[1])):
            return func(*args, **kwargs)
        if not args[0].is_leaf:
            self.prefix.drop("a hook is added to a value, or its graph is read (grad_fn)")
        if self._in_closure and self.plan.is_explicit:
            self.backward.use_full("a closure adds hooks, or reads the graph (grad_fn)")
        return func(*args, **kwargs)


def outside_first_pass(call: Callable[[], Any]) -> Any:
    """Run a call that a first pass need not observe before its backward."""
    mode = torch.overrides._get_current_function_mode()
    return mode.paused(call) if isinstance(mode, FirstPass) and not mode.backward.calls else call()


def _does_nothing(hook: Any) -> bool:
    """Whether this is the hook that Fabric adds to every output, and which acts only if its backward() is required."""
    return (
        isinstance(hook, partial)
        and hook.func.__module__.endswith("fabric.wrappers")
        and (hook.func.__name__, hook.args, hook.keywords) == ("_backward_hook", (False,), {})
    )


def _attribute(name: str, access: str) -> Any:
    """Returns the function that a mode receives when an attribute of a tensor is read or written."""
    return getattr(getattr(Tensor, name), access)


_MEMORY = (
    *(Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.storage, Tensor.untyped_storage, Tensor.__dlpack__),
    *(_attribute("data", "__get__"), _attribute("data", "__set__")),
)
_HOOKS = (
    *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad),
    _attribute("grad_fn", "__get__"),
)
_HANDLERS: dict[Any, Callable[[FirstPass, Any, Any, Any], Any]] = {
    Tensor.backward: FirstPass._on_backward,
    torch.autograd.backward: FirstPass._on_backward,
    torch.autograd.grad: FirstPass._on_grad,
    **dict.fromkeys(_MEMORY, FirstPass._on_memory_access),
    **dict.fromkeys(_HOOKS, FirstPass._on_hook),
}
