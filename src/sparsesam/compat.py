"""The interface of davda54/sam and pytorch-optimizer, so that existing code need not be rewritten."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsesam import sam, variants
from sparsesam.checkpoint import split_own
from sparsesam.gradients import gradients_of

Params = Iterable[Tensor] | Iterable[dict[str, Any]]
Base = Callable[..., Optimizer]
#: State keys of the two packages in addition to the base optimizer's.
_THEIR_STATE = ("old_p", "e_w", "old_g")


class OriginalCheckpoints(sam.SharpnessAware):
    """Loads checkpoints of the two packages."""

    #: Their state of a parameter, by our name of it.
    their_tensors: ClassVar[dict[str, str]] = {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer, or of one of the two packages."""
        if split_own(state_dict)[1] is not None:
            super().load_state_dict(state_dict)
            return
        outer, state_dict = state_dict["state"], state_dict.get("base_optimizer", state_dict)
        state = {
            key: {name: value for name, value in values.items() if name not in _THEIR_STATE}
            for key, values in state_dict["state"].items()
        }
        groups = [
            {**group, **({"adaptive": "all" if group["adaptive"] else False} if "adaptive" in group else {})}
            for group in state_dict["param_groups"]
        ]
        if not any(state.values()):
            warnings.warn(
                "the checkpoint holds no state of the base optimizer (davda54/sam does not save it): its momentum "
                "starts from zero",
                stacklevel=2,
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the checkpoint is from a bare base optimizer")
            super().load_state_dict(
                {"state": {key: values for key, values in state.items() if values}, "param_groups": groups}
            )
        parameters = [p for group in self.param_groups for p in group["params"]]
        for ours, theirs in self.their_tensors.items():
            found = ((p, outer.get(place, {}).get(theirs)) for place, p in enumerate(parameters))
            self.own.tensors[ours] = {self._names[p]: value.to(p, copy=True) for p, value in found if value is not None}


class SAM(OriginalCheckpoints, sam.SAM):
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
        params: Params,
        base_optimizer: Base,
        rho: float = 0.05,
        adaptive: bool = False,
        *,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        base, model = _made(params, base_optimizer, model, adaptive, kwargs)
        super().__init__(base, model, rho, **_scaling(adaptive))

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


def _made(
    params: Params,
    base_optimizer: Base,
    model: nn.Module | None,
    adaptive: bool,
    kwargs: dict[str, Any],
) -> tuple[Optimizer, nn.Module]:
    """Returns the base optimizer, and the model or a module of all parameters."""
    if kwargs.pop("use_gc", False):
        raise ValueError(
            "use_gc must be False, got True; centralize gradients in a step pre-hook of the base optimizer"
        )
    kwargs.pop("perturb_eps", None)  # a gradient of zero perturbs nothing anyway
    base = base_optimizer(params, **kwargs)
    for group in base.param_groups:
        group["adaptive"] = "all" if group.get("adaptive", adaptive) else False
    if model is None:
        model = nn.ParameterList([p for group in base.param_groups for p in group["params"]])
    return base, model


def _scaling(adaptive: bool) -> dict[str, Any]:
    return {"adaptive": "all" if adaptive else False, "eta": 0.0}


class LookSAM(SAM, variants.LookSAM):
    """pytorch-optimizer's ``LookSAM(params, SGD, rho=0.1, k=10, alpha=0.7, lr=0.1)``; `SAM` says what is added.

    It projects over all parameters together, as in the paper; theirs does so tensor by tensor. After loading a
    checkpoint of theirs, the first step is one of SAM.
    """

    def __init__(
        self,
        params: Params,
        base_optimizer: Base,
        rho: float = 0.1,
        k: int = 10,
        alpha: float = 0.7,
        adaptive: bool = False,
        *,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        base, model = _made(params, base_optimizer, model, adaptive, kwargs)
        variants.LookSAM.__init__(self, base, model, rho, every=k, alpha=alpha, **_scaling(adaptive))


class FriendlySAM(SAM, variants.FriendlySAM):
    """pytorch-optimizer's ``FriendlySAM(params, SGD, rho=0.05, sigma=1.0, lmbda=0.9)``, with the same results."""

    their_tensors = {"average": "momentum"}  # noqa: RUF012

    def __init__(
        self,
        params: Params,
        base_optimizer: Base,
        rho: float = 0.05,
        sigma: float = 1.0,
        lmbda: float = 0.9,
        adaptive: bool = False,
        *,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        base, model = _made(params, base_optimizer, model, adaptive, kwargs)
        variants.FriendlySAM.__init__(self, base, model, rho, sigma=sigma, decay=lmbda, **_scaling(adaptive))


class WSAM(SAM, variants.WSAM):
    """pytorch-optimizer's ``WSAM(model, params, SGD, rho=0.05, gamma=0.9, lr=0.1)``, with the same results.

    As in that package, ``step(closure)`` runs both passes, and ``max_norm`` clips the gradient at w + e.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Params,
        base_optimizer: Base,
        rho: float = 0.05,
        gamma: float = 0.9,
        adaptive: bool = False,
        decouple: bool = True,
        max_norm: float | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("eps", None)
        base, model = _made(params, base_optimizer, model, adaptive, kwargs)
        self.max_norm = max_norm
        variants.WSAM.__init__(self, base, model, rho, gamma=gamma, decouple=decouple, **_scaling(adaptive))

    def step(self, closure: Callable[..., Any] | None = None, **options: Any) -> Any:
        return variants.WSAM.step(self, closure, **options)

    def combine(self, names: list[str], first: list[Tensor] | None, second: list[Tensor]) -> None:
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        super().combine(names, first, second)


class GSAM(OriginalCheckpoints, variants.GSAM):
    """pytorch-optimizer's ``GSAM(params, base, model, rho_scheduler, alpha=0.4)``, with the same results.

    ``set_closure(loss_fn, inputs, targets)``, then ``step()``, which returns outputs and loss; after each step of the
    learning rate's scheduler, ``update_rho_t()``. The parameters are those of ``base``.
    """

    _loss: Callable[[], tuple[Tensor, Any]] | None = None

    def __init__(
        self,
        params: Any,
        base_optimizer: Optimizer,
        model: nn.Module,
        rho_scheduler: Any,
        alpha: float = 0.4,
        adaptive: bool = False,
        **_: Any,
    ) -> None:
        self.rho_scheduler = rho_scheduler
        super().__init__(base_optimizer, model, rho_scheduler.step(), alpha=alpha, **_scaling(adaptive))

    @classmethod
    def _check_call(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pass

    @property
    def rho_t(self) -> float:
        return float(self.param_groups[0][self.rho_key])

    def update_rho_t(self) -> float:
        """Set rho to the next value of the scheduler."""
        rho = self.rho_scheduler.step()
        for group in self.param_groups:
            group[self.rho_key] = rho
        return float(rho)

    def set_closure(self, loss_fn: Callable[..., Tensor], inputs: Any, targets: Any, **kwargs: Any) -> None:
        def loss() -> tuple[Tensor, Any]:
            outputs = self.model(inputs)
            return loss_fn(outputs, targets, **kwargs), outputs

        self._loss = loss

    def step(self, closure: Callable[..., Any] | None = None, **options: Any) -> Any:
        if closure is not None or self._step is not None or self._loss is None:
            return super().step(closure, **options)
        loss, outputs = self.minimize(self._loss, has_aux=True)
        return outputs, loss
