"""The interface of davda54/sam and pytorch-optimizer, so that existing code need not be rewritten."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

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
#: Our names of their arguments, where they differ.
_OURS = {"k": "every", "lmbda": "decay"}


class Original(sam.SharpnessAware):
    """Is called like the optimizers of the two packages, and loads their checkpoints."""

    #: Their state of a parameter, by our name of it.
    their_tensors: ClassVar[dict[str, str]] = {}

    @classmethod
    def _check_call(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Accept calls that our own optimizers refuse."""

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
            {**group, **({"adaptive": _scaled(group["adaptive"])} if "adaptive" in group else {})}
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


class SAM(Original, sam.SAM):
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

    #: Their arguments after the base optimizer, in their order, with their defaults.
    their_arguments: ClassVar[dict[str, Any]] = {"rho": 0.05, "adaptive": False}
    #: Arguments without effect: a gradient of zero perturbs nothing anyway.
    ignored: ClassVar[tuple[str, ...]] = ("perturb_eps",)
    _away: AbstractContextManager[None] | None = None  # the perturbed() block between first_step and second_step

    def __init__(
        self, params: Params, base_optimizer: Base, *args: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        if kwargs.pop("use_gc", False):
            raise ValueError(
                "use_gc must be False, got True; centralize gradients in a step pre-hook of the base optimizer"
            )
        given = {**dict(zip(self.their_arguments, args, strict=False)), **kwargs}
        options = {_OURS.get(name, name): given.pop(name, default) for name, default in self.their_arguments.items()}
        base = base_optimizer(params, **{name: value for name, value in given.items() if name not in self.ignored})
        for group in base.param_groups:
            group["adaptive"] = _scaled(group.get("adaptive", options["adaptive"]))
        if model is None:
            model = nn.ParameterList([p for group in base.param_groups for p in group["params"]])
        super().__init__(base, model, **{**options, "adaptive": _scaled(options["adaptive"]), "eta": 0.0})

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


def _scaled(adaptive: bool) -> Literal["all", False]:
    return "all" if adaptive else False


class LookSAM(SAM, variants.LookSAM):
    """pytorch-optimizer's ``LookSAM(params, SGD, rho=0.1, k=10, alpha=0.7, lr=0.1)``; `SAM` says what is added.

    It projects over all parameters together, as in the paper; theirs does so tensor by tensor. After loading a
    checkpoint of theirs, the first step is one of SAM.
    """

    their_arguments: ClassVar[dict[str, Any]] = {"rho": 0.1, "k": 10, "alpha": 0.7, "adaptive": False}


class FriendlySAM(SAM, variants.FriendlySAM):
    """pytorch-optimizer's ``FriendlySAM(params, SGD, rho=0.05, sigma=1.0, lmbda=0.9)``, with the same results."""

    their_tensors: ClassVar[dict[str, str]] = {"average": "momentum"}
    their_arguments: ClassVar[dict[str, Any]] = {"rho": 0.05, "sigma": 1.0, "lmbda": 0.9, "adaptive": False}


class WSAM(SAM, variants.WSAM):
    """pytorch-optimizer's ``WSAM(model, params, SGD, rho=0.05, gamma=0.9, lr=0.1)``, with the same results.

    As in that package, ``step(closure)`` runs both passes, and ``max_norm`` clips the gradient at w + e.
    """

    their_arguments: ClassVar[dict[str, Any]] = {"rho": 0.05, "gamma": 0.9, "adaptive": False, "decouple": True}
    ignored: ClassVar[tuple[str, ...]] = ("eps",)

    def __init__(self, model: nn.Module, params: Params, base_optimizer: Base, *args: Any, **kwargs: Any) -> None:
        self.max_norm = args[4] if len(args) > 4 else kwargs.pop("max_norm", None)
        super().__init__(params, base_optimizer, *args, model=model, **kwargs)

    def step(self, closure: Callable[..., Any] | None = None, **options: Any) -> Any:
        return variants.WSAM.step(self, closure, **options)

    def combine(self, names: list[str], first: list[Tensor] | None, second: list[Tensor]) -> None:
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        super().combine(names, first, second)


class GSAM(Original, variants.GSAM):
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
        super().__init__(base_optimizer, model, rho_scheduler.step(), alpha=alpha, adaptive=_scaled(adaptive), eta=0.0)

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
