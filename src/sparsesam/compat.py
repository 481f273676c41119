"""The interface of davda54/sam and pytorch-optimizer, so that existing code need not be rewritten."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsesam import sam
from sparsesam.checkpoint import split_own
from sparsesam.gradients import gradients_of

#: State keys of the two packages in addition to the base optimizer's.
_THEIR_STATE = ("old_p", "e_w", "old_g")


class SAM(sam.SAM):
    """``SAM(params, torch.optim.SGD, rho=0.05, lr=0.1)`` with ``first_step``, ``second_step`` and ``step(closure)``.

        loss_fn(model(x), y).backward()
        optimizer.first_step(zero_grad=True)
        loss_fn(model(x), y).backward()
        optimizer.second_step(zero_grad=True)

    Results are the same as in these packages: ``adaptive=True`` also scales biases and has no eta; ``step(closure)``
    needs a gradient at w and calls the closure once. Checkpoints of these packages load. In addition, weights are
    restored bit for bit, checkpoints hold the base optimizer's momentum, and with ``model=`` the running statistics of
    normalization layers are updated once per step.
    """

    _away: AbstractContextManager[None] | None = None  # the perturbed() block between first_step and second_step

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        base_optimizer: Callable[..., Optimizer],
        rho: float = 0.05,
        adaptive: bool = False,
        *,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        base = base_optimizer(params, **kwargs)
        for group in base.param_groups:
            group["adaptive"] = "all" if group.get("adaptive", adaptive) else False
        if model is None:
            model = nn.ParameterList([p for group in base.param_groups for p in group["params"]])
        super().__init__(base, model, rho, adaptive="all" if adaptive else False, eta=0.0)

    @classmethod
    def _check_call(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pass

    @property
    def base_optimizer(self) -> Optimizer:
        return self.base

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        """Move to w + e along the current gradient, until `second_step`."""
        if self._away is not None:
            raise RuntimeError("first_step() must not be called twice; call second_step() before the next ascent")
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
        if next(gradients_of(self.base), None) is None:
            raise RuntimeError(
                "step(closure) needs the gradient at w: call loss.backward() before it, as in davda54/sam. "
                "sparsesam.SAM takes torch.optim's closures, which run both passes"
            )
        with self.perturbed(), torch.enable_grad():
            loss = closure()
        super().step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer, or of one of the two packages."""
        if split_own(state_dict)[1] is not None:
            super().load_state_dict(state_dict)
            return
        state = {
            key: {name: value for name, value in one.items() if name not in _THEIR_STATE}
            for key, one in state_dict["state"].items()
        }
        groups = [
            {**group, "adaptive": "all" if group.get("adaptive") else False} for group in state_dict["param_groups"]
        ]
        if not any(state.values()):
            warnings.warn(
                "the checkpoint holds no state of the base optimizer (davda54/sam does not save it): its momentum "
                "starts from zero",
                stacklevel=2,
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the checkpoint is from a bare base optimizer")
            super().load_state_dict({"state": {k: one for k, one in state.items() if one}, "param_groups": groups})
