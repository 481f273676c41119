"""What the passes of a step do to gradients: missing, left over from before, outside the optimizer; parts of a batch.

Trainers that accumulate over micro-batches add to existing gradients. Such a micro-batch must not be taken for a whole
step: the second pass would see the last micro-batch only.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from sparsesam.distributed.shards import is_sharded
from sparsesam.utils.batches import batch_size, scalar_loss, slice_batch


def gradients_of(base: Optimizer) -> Iterator[Tensor]:
    for group in base.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter.grad


def has_gradients(base: Optimizer) -> bool:
    return next(gradients_of(base), None) is not None


def require_gradients(base: Optimizer, which: str) -> None:
    if not has_gradients(base):
        raise RuntimeError(
            f"the {which} pass made no gradients: the closure (or your loop) must call backward() on a loss that "
            "depends on the optimizer's parameters, and must not clear the gradients afterwards"
        )


# ---- gradients from before a pass ----------------------------------------------------------------------------

ACCUMULATED = (
    "the closure accumulated into existing gradients, but at w + e only the closure's own gradients are computed, not "
    "the accumulated ones. Clear them in the closure (opt.zero_grad()); to accumulate, give opt.minimize() a list of "
    "functions, or in a loop run all micro-batches in the first pass and again in `with opt.perturbed():`. For "
    "trainers and closures of other packages see docs/moving-over.md"
)
UNUSED = (
    "this first pass added to the gradient of the last perturbed(), which no step() has used: with micro-batches, run "
    "all of them in the first pass and all again in one perturbed() block, then step(). To skip a step, call "
    "opt.zero_grad(). For trainers see docs/moving-over.md"
)


class OldGradients:
    """Tells whether a pass adds to the gradients that exist before it, or leaves them untouched; until `release`.

    A hook looks at the smallest of them just before autograd adds to it. Sharded parameters are not watched, because
    autograd does not write their gradients.
    """

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self._parameters = [parameter for parameter in parameters if not is_sharded(parameter)]
        self._was_there: bool | None = None  # when the pass first added to it
        with_gradient = [p for p in self._parameters if p.grad is not None and p.requires_grad]
        self._watched = min(with_gradient, key=Tensor.numel, default=None)
        if self._watched is not None and self._watched.grad is not None:
            self._gradient, self._version = self._watched.grad, self._watched.grad._version
            self._versions = self._versions_now()
            self._node = get_gradient_edge(self._watched).node  # lives as long as somebody holds it
            self._hook = self._node.register_prehook(self._before_accumulation)

    @property
    def are_untouched(self) -> bool:
        """Whether no gradient was cleared, written or added to."""
        return self._was_there is None and self._is_unchanged() and self._versions == self._versions_now()

    def require_not_added_to(self, message: str) -> None:
        is_added_to = self._was_there
        if is_added_to is None:  # the pass did not reach the watched gradient; it may have added to others
            is_added_to = self._is_unchanged() and not self.are_untouched and self._is_there()
        if is_added_to:
            raise RuntimeError(message)

    def release(self) -> None:
        if self._watched is not None:
            self._hook.remove()

    def __enter__(self) -> OldGradients:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _before_accumulation(self, _: Any) -> None:
        if self._was_there is None:
            self._was_there = self._is_there()

    def _is_there(self) -> bool:
        gradient = None if self._watched is None else self._watched.grad
        if gradient is None:
            return False
        return bool(gradient._nnz() if gradient.is_sparse else gradient.any())

    def _is_unchanged(self) -> bool:
        gradient = None if self._watched is None else self._watched.grad
        return gradient is not None and gradient is self._gradient and gradient._version == self._version

    def _versions_now(self) -> list[int | None]:
        return [None if p.grad is None else p.grad._version for p in self._parameters]


@contextmanager
def restored_outside(model: nn.Module, base: Optimizer) -> Iterator[None]:
    """Restores gradients of trainable parameters outside the optimizer to what they were before a first pass added.

    The optimizer clears only its own gradients between the passes; the others too shall receive the gradient of the
    second pass only. Hooks copy a gradient when it is first added to, so that the pass may clear it.
    """
    own = {id(parameter) for group in base.param_groups for parameter in group["params"]}
    outside = [p for p in model.parameters() if p.requires_grad and id(p) not in own and not is_lazy(p)]
    # fully_shard sets gradients without autograd's accumulators.
    sharded = [(p, p.grad, _copied_gradient(p)) for p in outside if is_sharded(p)]
    nodes = [(p, get_gradient_edge(p).node) for p in outside if not is_sharded(p)]  # they live as long as this list
    before: dict[Tensor, Tensor | None] = {}

    def note(parameter: Tensor, _: Any) -> None:
        if parameter not in before:
            before[parameter] = _copied_gradient(parameter)

    try:
        with ExitStack() as hooks:
            for parameter, node in nodes:
                hooks.callback(node.register_prehook(partial(note, parameter)).remove)
            yield
    finally:
        for changed, gradient in before.items():
            changed.grad = gradient
        for p, old, copied in sharded:
            p.grad = copied if p.grad is old else None  # another one: it was cleared


def _copied_gradient(parameter: Tensor) -> Tensor | None:
    return None if parameter.grad is None else parameter.grad.clone()


# ---- calls of a closure --------------------------------------------------------------------------------------


def takes_batch(closure: Callable[..., Any]) -> bool:
    """Whether the closure takes the batch; a closure for torch.optim takes no argument."""
    closure = closure.functions[0] if isinstance(closure, Objective) else closure
    return any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in inspect.signature(closure).parameters.values()
    )


def part_of(batch: Any, fraction: float) -> Any:
    """Returns the first samples of the batch, this share of them but at least one."""
    size = batch_size(batch)
    return slice_batch(batch, slice(0, max(1, math.ceil(fraction * size))), size)


def without_graph(result: Any) -> Any:
    """Returns what a closure returned with all tensors detached, also those in dictionaries, lists and tuples."""
    return result.detach() if isinstance(result, Tensor) else tree_map(_detached, result)


def _detached(leaf: Any) -> Any:
    if not isinstance(leaf, dict | list):
        return leaf.detach() if isinstance(leaf, Tensor) else leaf
    # torch's pytrees treat a dict or list subclass as a leaf unless it is registered.
    copied = copy.copy(leaf)
    for key, value in list(leaf.items() if isinstance(leaf, dict) else enumerate(leaf)):
        copied[key] = without_graph(value)
    return copied


class Objective:
    """The closure that `SharpnessAware.minimize` makes of functions that return a loss."""

    def __init__(self, optimizer: Any, loss: Any, *, has_aux: bool, scaler: torch.amp.GradScaler | None) -> None:
        self._optimizer, self._has_aux, self._scaler = optimizer, has_aux, scaler
        self._is_list = isinstance(loss, list | tuple)
        self.functions = list(loss) if self._is_list else [loss]
        if not self.functions or not all(map(callable, self.functions)):
            raise TypeError(f"loss must be a function that returns the loss, or a list of them, got {loss!r}")

    def __call__(self, *batch: Any) -> Any:
        """Add up losses and gradients of the functions; gradients must have been cleared."""
        optimizer, total, extras = self._optimizer, None, []
        for number, function in enumerate(self.functions, start=1):
            is_last = number == len(self.functions)
            ddp = None if is_last else optimizer._ddp
            with nullcontext() if ddp is None else ddp.no_sync():
                result = function(*batch)
                with torch._C.DisableTorchFunction():  # what is not the function's own is not seen by replay.py
                    if number == 1 and has_gradients(optimizer.base):
                        raise RuntimeError(
                            "loss must not call backward(): minimize() differentiates what it returns. For a closure "
                            "that calls backward() itself, use opt.step(closure)"
                        )
                    value, aux = result if self._has_aux else (result, None)
                    if not isinstance(value, Tensor) or value.dim() > 0:
                        value = scalar_loss(value, "loss")
                optimizer.backward(value if self._scaler is None else self._scaler.scale(value))
            with torch._C.DisableTorchFunction():
                total = value.detach() if total is None else total + value.detach()
                extras.append(without_graph(aux))
            del result, aux, value
        if not self._has_aux:
            return total
        return total, extras if self._is_list else extras[0]
