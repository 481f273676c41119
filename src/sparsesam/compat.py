"""The interface of davda54/sam and of pytorch-optimizer's SAM, so that existing code need not be rewritten."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsesam import sam
from sparsesam.checkpoint import split_own
from sparsesam.gradients import has_gradients


class SAM(sam.SAM):
    """``SAM(params, torch.optim.SGD, rho=0.05, lr=0.1)`` with ``first_step``, ``second_step`` and ``step(closure)``.

        loss_fn(model(x), y).backward()
        optimizer.first_step(zero_grad=True)
        loss_fn(model(x), y).backward()
        optimizer.second_step(zero_grad=True)

    Results are the same as in these packages: ``adaptive=True`` also scales biases and has no eta; ``step(closure)``
    needs a gradient at w and calls the closure once. In addition, weights are restored bit for bit, checkpoints hold
    the base optimizer's momentum, and with ``model=`` the running statistics of normalization layers are updated once
    per step. Checkpoints of these packages, which lack the momentum, do not load.
    """

    _away: AbstractContextManager[None] | None = None  # the perturbed() block between first_step and second_step

    def __new__(cls, *_: Any, **__: Any) -> SAM:
        return Optimizer.__new__(cls)  # the call that our own optimizers refuse

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        base_optimizer: Callable[..., Optimizer],
        rho: float = 0.05,
        adaptive: bool = False,
        *,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        if options.pop("use_gc", False):
            raise ValueError(
                "use_gc must be False, got True; centralize gradients in a step pre-hook of the base optimizer"
            )
        options.pop("perturb_eps", None)  # a gradient of zero perturbs nothing anyway
        base = base_optimizer(params, **options)
        for group in base.param_groups:
            group["adaptive"] = _scaled(group.get("adaptive", adaptive))
        if model is None:
            model = nn.ParameterList([p for group in base.param_groups for p in group["params"]])
        super().__init__(base, model, rho, adaptive=_scaled(adaptive), eta=0.0)

    @property
    def base_optimizer(self) -> Optimizer:
        return self.base

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        """Move to w + e along the current gradient, until `second_step`."""
        gradients = [(p, p.grad) for group in self.param_groups for p in group["params"]]
        away = self.perturbed()
        away.__enter__()
        self._away = away
        if not zero_grad:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        """Return to w and take the base optimizer's step with the current gradient."""
        if self._away is None:
            raise RuntimeError("second_step() needs a first_step() before it")
        away, self._away = self._away, None
        away.__exit__(None, None, None)
        super().step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        """With the gradient at w, run first_step, the closure at w + e, second_step; returns the closure's result."""
        if closure is None:
            raise RuntimeError("step() needs a closure that computes the loss and its gradient; or use the two steps")
        if not has_gradients(self.base):
            raise RuntimeError(
                "step(closure) needs the gradient at w: call loss.backward() before it, as in davda54/sam. "
                "sparsesam.SAM takes torch.optim's closures, which run both passes"
            )
        with self.perturbed(), torch.enable_grad():
            loss = closure()
        super().step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if split_own(state_dict)[1] is None:
            raise ValueError(
                "the checkpoint must be one of sparsesam, not of another package: load the model's weights alone, and "
                "start with a new optimizer"
            )
        super().load_state_dict(state_dict)


def _scaled(adaptive: bool) -> Literal["all", False]:
    return "all" if adaptive else False
