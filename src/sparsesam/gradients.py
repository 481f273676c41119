"""The gradients around a step: those that are there, those that a step has used, those that are not the optimizer's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

from sparsesam.ascent.first_pass import unwatched
from sparsesam.ascent.old_gradient import OldGradient, Treatment
from sparsesam.parameters import PerturbedParams


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


class GradientUse:
    """What has become of the gradients of the last step.

    Those that a step of one pass has used may be cleared before the next. Those of perturbed() wait for a step: a first
    pass that adds to them instead has left out the step.
    """

    def __init__(self, base: Optimizer) -> None:
        self._base = base
        self._used: tuple[Tensor, int] | None = None  # that of the smallest parameter, and its version
        self._waiting: OldGradient | None = None

    def clear(self, set_to_none: bool = True) -> None:
        unwatched(partial(self._base.zero_grad, set_to_none))
        self._used = None
        self.stop_waiting()

    def note_used(self, params: PerturbedParams) -> None:
        """A step has used those that are there now."""
        gradient = None if params.smallest is None else params.smallest.grad
        self._used = None if gradient is None else (gradient, gradient._version)

    def are_used(self, params: PerturbedParams) -> bool:
        """Whether those that are there were used by the last step, and nobody has cleared them since."""
        if params.smallest is None or self._used is None:
            return False
        gradient, version = self._used
        return params.smallest.grad is gradient and gradient._version == version

    def wait_for_step(self, params: PerturbedParams) -> None:
        """They are those of perturbed()."""
        self._waiting = OldGradient([one.parameter for one in params])

    def stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.release()
            self._waiting = None

    def require_none_waiting(self) -> None:
        """Those of the last perturbed() were used by a step, or cleared."""
        waiting = self._waiting
        self.stop_waiting()
        if waiting is not None and waiting.treatment() is Treatment.ADDED_TO:
            raise RuntimeError(
                "this first pass added to the gradient of the last perturbed(), which no step() has used: with micro-"
                "batches, run all of them in the first pass and all again in one perturbed() block, then step(); with "
                "accelerator.accumulate, use sparsesam.integrations.accelerate.AccumulatedPasses. To leave a step out, "
                "call opt.zero_grad()"
            )


class OutsideGradients:
    """Gradients of trainable parameters that the optimizer does not have, as they were before the first pass.

    The optimizer clears its own gradients between the passes; of the others, the second pass is the only one that
    counts.
    """

    def __init__(self, model: nn.Module, base: Optimizer) -> None:
        own = {id(parameter) for group in base.param_groups for parameter in group["params"]}
        others = [one for one in model.parameters() if one.requires_grad and id(one) not in own]
        self._before = [(one, None if one.grad is None else one.grad.clone()) for one in others]

    def restore(self) -> None:
        for parameter, gradient in self._before:
            parameter.grad = gradient
