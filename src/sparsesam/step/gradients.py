"""Tracks gradients across steps: missing, left over from an earlier step, or of parameters outside the optimizer.

Trainers that accumulate over micro-batches add to existing gradients. Such a micro-batch must not be taken for a whole
step: the second pass would see the last micro-batch only.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sparsesam.ascent.first_pass import outside_first_pass
from sparsesam.distributed.shards import is_sharded
from sparsesam.step.parameters import PerturbedParams


def gradients_of(base: Optimizer) -> Iterator[Tensor]:
    for group in base.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter.grad


def require_gradients(base: Optimizer, which: str) -> None:
    if next(gradients_of(base), None) is None:
        raise RuntimeError(
            f"the {which} pass made no gradients: the closure (or your loop) must call backward() on a loss that "
            "depends on the optimizer's parameters, and must not clear the gradients afterwards"
        )


class Treatment(enum.Enum):
    CLEARED = enum.auto()  # or there was no gradient
    ADDED_TO = enum.auto()
    UNTOUCHED = enum.auto()  # neither cleared nor added to


class OldGradient:
    """Watches the gradient of one small parameter that has one now, until `release`.

    A hook checks the gradient just before autograd adds to it. Sharded parameters are not watched, because autograd
    does not write their gradients.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._treatment: Treatment | None = None
        with torch._C.DisableTorchFunction():
            with_gradient = [p for p in parameters if p.grad is not None and p.requires_grad and not is_sharded(p)]
            self._watched = min(with_gradient, key=Tensor.numel, default=None)
            self._versions = self._gradient_versions()
            self._gradient = None if self._watched is None else self._watched.grad
            if self._watched is not None:
                self._accumulator = _accumulator_of(self._watched)
                self._handle = self._accumulator.register_prehook(self._before_accumulation)

    def treatment(self) -> Treatment:
        """Returns what happened to the gradient first: it was cleared, added to, or left untouched."""
        if self._watched is None:
            return Treatment.CLEARED
        if self._treatment is not None:
            return self._treatment
        with torch._C.DisableTorchFunction():
            index = next(i for i, p in enumerate(self._parameters) if p is self._watched)
            versions = self._gradient_versions()
            if self._watched.grad is not self._gradient or versions[index] != self._versions[index]:
                return Treatment.CLEARED  # or assigned by hand
            if versions == self._versions:
                return Treatment.UNTOUCHED
            return Treatment.ADDED_TO if self._is_there() else Treatment.CLEARED

    def release(self) -> None:
        if self._watched is not None:
            self._handle.remove()

    def _before_accumulation(self, _: Any) -> None:
        if self._treatment is None:
            with torch._C.DisableTorchFunction():
                self._treatment = Treatment.ADDED_TO if self._is_there() else Treatment.CLEARED

    def _is_there(self) -> bool:
        gradient = None if self._watched is None else self._watched.grad
        if gradient is None:
            return False
        return bool(gradient._nnz() if gradient.is_sparse else gradient.any())

    def _gradient_versions(self) -> list[int | None]:
        return [None if p.grad is None else p.grad._version for p in self._parameters]


class GradientUse:
    """Tracks whether the gradients of the last step have been used.

    Gradients that a one-pass step has used may be cleared before the next step. Gradients of perturbed() wait for a
    step: if a first pass adds to them instead, step() was not called.
    """

    def __init__(self, base: Optimizer) -> None:
        self._base = base
        self._used: tuple[Tensor, int] | None = None  # gradient of the smallest parameter, and its version
        self._waiting: OldGradient | None = None

    def clear(self, set_to_none: bool = True) -> None:
        outside_first_pass(partial(self._base.zero_grad, set_to_none))
        self._used = None
        self.stop_waiting()

    def note_used(self, params: PerturbedParams) -> None:
        """Record that a step has used the current gradients."""
        gradient = None if params.smallest is None else params.smallest.grad
        self._used = None if gradient is None else (gradient, gradient._version)

    def are_used(self, params: PerturbedParams) -> bool:
        """Whether the last step used the current gradients, and they have not changed since."""
        if params.smallest is None or self._used is None:
            return False
        gradient, version = self._used
        return params.smallest.grad is gradient and gradient._version == version

    def wait_for_step(self, params: PerturbedParams) -> None:
        """Record that the current gradients come from perturbed()."""
        self._waiting = OldGradient([one.parameter for one in params])

    def stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.release()
            self._waiting = None

    def require_none_waiting(self) -> None:
        """Raise if a first pass added to gradients of perturbed() that no step has used."""
        waiting = self._waiting
        self.stop_waiting()
        if waiting is not None and waiting.treatment() is Treatment.ADDED_TO:
            raise RuntimeError(
                "this first pass added to the gradient of the last perturbed(), which no step() has used: with micro-"
                "batches, run all of them in the first pass and all again in one perturbed() block, then step(); with "
                "accelerator.accumulate, use sparsesam.integrations.accelerate.AccumulatedPasses. To skip a step, "
                "call opt.zero_grad()"
            )


class OutsideGradients:
    """Restores gradients of trainable parameters outside the optimizer to what they were before a first pass added.

    The optimizer clears only its own gradients between the passes; the others too shall receive the gradient of the
    second pass only. Hooks copy a gradient when it is first added to, so that the pass may clear it.
    """

    def __init__(self, model: nn.Module, base: Optimizer) -> None:
        own = {id(parameter) for group in base.param_groups for parameter in group["params"]}
        outside = [one for one in model.parameters() if one.requires_grad and id(one) not in own and not is_lazy(one)]
        # fully_shard sets gradients without autograd's accumulators.
        self._sharded = [(one, one.grad, _copied_gradient(one)) for one in outside if is_sharded(one)]
        self._accumulators = [(one, _accumulator_of(one)) for one in outside if not is_sharded(one)]
        self._before: dict[Tensor, Tensor | None] = {}
        self._hooks: list[RemovableHandle] = []

    def watch(self) -> OutsideGradients:
        """Register the hooks."""
        try:
            for one, node in self._accumulators:
                self._hooks.append(node.register_prehook(partial(self._note, one)))
        except BaseException:  # Ctrl-C
            self.release()
            raise
        return self

    def _note(self, parameter: Tensor, _: Any) -> None:
        if parameter not in self._before:
            with torch._C.DisableTorchFunction():
                self._before[parameter] = _copied_gradient(parameter)

    def restore(self) -> None:
        """Remove the hooks and restore the gradients."""
        before, sharded = self._before, self._sharded
        self.release()
        for parameter, gradient in before.items():
            parameter.grad = gradient
        for parameter, old, copied in sharded:
            parameter.grad = copied if parameter.grad is old else None  # another one: it was cleared

    def release(self) -> None:
        """Remove the hooks and leave the gradients as they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._before, self._sharded, self._accumulators = [], {}, [], []

    def __enter__(self) -> None:
        self.watch()

    def __exit__(self, *_: object) -> None:
        self.restore()


def _copied_gradient(parameter: Tensor) -> Tensor | None:
    return None if parameter.grad is None else parameter.grad.clone()


def _accumulator_of(parameter: Tensor) -> Any:
    """The node that adds to its gradient; it lives as long as somebody holds it."""
    with torch.enable_grad():
        copied: Any = parameter.expand_as(parameter)
    return copied.grad_fn.next_functions[0][0]
