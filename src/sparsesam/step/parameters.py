"""The optimizer's parameters: their names, their group options, and which of them are perturbed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsesam.distributed.shards import Shards

#: Options of each parameter group in addition to the base optimizer's.
GROUP_OPTIONS = ("rho", "adaptive", "eta", "perturb")


def option_keys(base: Optimizer) -> dict[str, str]:
    """Returns the parameter group key of each of `GROUP_OPTIONS`.

    It is the option's name, with the prefix ``"sam_"`` if the base optimizer has an option of the same name: in a
    group of Adadelta, ``"rho"`` is Adadelta's and ``"sam_rho"`` is the radius of the perturbation.
    """
    return {option: f"sam_{option}" if option in base.defaults else option for option in GROUP_OPTIONS}


def named(model: nn.Module, base: Optimizer) -> dict[Tensor, str]:
    """Returns the names of the model's parameters; raises unless they include all of the optimizer's."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    optimized = [parameter for group in base.param_groups for parameter in group["params"]]
    unknown = sum(parameter not in names for parameter in optimized)
    if not names or not optimized:
        raise ValueError(
            f"model must have parameters to train, got {type(model).__name__} with {len(names)} parameters "
            f"and an optimizer with {len(optimized)}"
        )
    if unknown:
        raise ValueError(
            f"model must own every parameter of the base optimizer, but {unknown} of {len(optimized)} are not in "
            f"{type(model).__name__}; pass the model the optimizer was made for, or an nn.ModuleList of all of them"
        )
    return names


class PerturbedParam(NamedTuple):
    """A parameter that is perturbed.

    ``rho`` is a tensor if its group holds one on an accelerator (for CUDA graphs), which the host does not read.
    ``eta`` is ASAM's where T = |w| + eta, None where T = 1. ``maximize``: the base optimizer maximizes the loss, so
    the perturbation goes against the gradient.
    """

    name: str
    parameter: Tensor
    rho: float | Tensor
    eta: float | None
    maximize: bool


class PerturbedParams:
    """The trainable parameters of the perturbed groups; valid while `is_current`.

    ``shards`` is their layout over the ranks; None: every rank holds whole tensors. ``renormalized`` are weights of
    embeddings with ``max_norm``: a forward rescales their rows in place, whatever the mask keeps.
    """

    def __init__(self, model: nn.Module, base: Optimizer, names: Mapping[Tensor, str]) -> None:
        self._base, self._groups = base, list(base.param_groups)  # references, so that no id is reused
        self._depends_on = _what_it_depends_on(base)
        self._params = list(_listed(base, names))
        self.shards = Shards.of({one.name: one.parameter for one in self})
        self.renormalized = [
            weight
            for module in model.modules()
            for name, weight in module._parameters.items()
            if name == "weight" and weight is not None and getattr(module, "max_norm", None) is not None
        ]
        self.smallest = min((one.parameter for one in self), key=Tensor.numel, default=None)

    @property
    def is_current(self) -> bool:
        """Whether groups, their options and requires_grad flags are unchanged."""
        return _what_it_depends_on(self._base) == self._depends_on

    def __iter__(self) -> Iterator[PerturbedParam]:
        return iter(self._params)


def _listed(base: Optimizer, names: Mapping[Tensor, str]) -> Iterator[PerturbedParam]:
    for group in base.param_groups:
        rho, adaptive, eta, perturb = (group[key] for key in option_keys(base).values())
        # torch's optimizers hold it in their groups, others (pytorch-optimizer) in an attribute.
        maximize = bool(group.get("maximize", getattr(base, "maximize", False)))
        for parameter in group["params"] if perturb else ():
            if parameter.requires_grad:
                name = names[parameter]
                scales = adaptive == "all" or (adaptive and not name.rpartition(".")[2].endswith("bias"))  # as in ASAM
                yield PerturbedParam(name, parameter, _read(rho), float(eta) if scales else None, maximize)


def _read(option: Any) -> Any:
    """Returns the value of a CPU tensor as a number; anything else unchanged."""
    return float(option) if isinstance(option, Tensor) and not is_on_accelerator(option) else option


def _what_it_depends_on(base: Optimizer) -> list[Any]:
    options = (*option_keys(base).values(), "maximize")
    return [
        (
            id(group),
            [id(group[key]) if is_on_accelerator(group.get(key)) else _read(group.get(key)) for key in options],
            list(map(id, group["params"])),
            [parameter.requires_grad for parameter in group["params"]],
        )
        for group in base.param_groups
    ]


def scale_rho(base: Optimizer, factor: float, defaults: Mapping[str, Any]) -> None:
    """Set rho to factor * its initial value, in each group."""
    key = option_keys(base)["rho"]
    for group in base.param_groups:
        now = group.setdefault(key, defaults[key])
        first = group.setdefault(f"initial_{key}", now.clone() if isinstance(now, Tensor) else now)
        # In place, because a captured CUDA graph reads this tensor.
        group[key] = now.copy_(first * factor) if isinstance(now, Tensor) else first * factor


def check_group(group: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    """Raise ValueError for invalid options, naming their keys in the group."""
    rho, eta, adaptive = (group[keys[option]] for option in ("rho", "eta", "adaptive"))
    if isinstance(rho, Tensor) and not is_on_accelerator(rho):
        rho = rho.item()
    if not is_on_accelerator(rho) and not (isinstance(rho, int | float) and 0 <= rho < math.inf):
        raise ValueError(
            f"{keys['rho']} must be a finite number of at least 0, got {rho}; 0 is the base optimizer, 0.05 is a "
            "usual start"
        )
    if not isinstance(eta, int | float) or not 0 <= eta < math.inf:
        raise ValueError(f"{keys['eta']} must be a finite number of at least 0, got {eta}; ASAM uses 0.01")
    if adaptive not in (False, True, "all"):
        raise ValueError(f'{keys["adaptive"]} must be False, True (weights only) or "all", got {adaptive!r}')


def is_on_accelerator(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def check_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise TypeError for the signature of other packages, ``SAM(params, SGD, rho=…, lr=…)``."""
    takes_class = any(isinstance(one, type) for one in (*args[:2], kwargs.get("base"), kwargs.get("base_optimizer")))
    if takes_class or {"lr", "params", "base_optimizer"} & kwargs.keys():
        raise TypeError(
            f"base must be a torch.optim.Optimizer instance, and model its nn.Module: write {name}(torch.optim.SGD("
            "model.parameters(), lr=0.1), model, rho=0.05). The call SAM(params, SGD, rho=0.05, lr=0.1) of davda54/sam "
            "and pytorch-optimizer, with first_step() and second_step(), is sparsesam.compat.SAM"
        )


def check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be the torch.nn.Module that the base optimizer trains, got {model!r}; "
            "write SAM(torch.optim.SGD(model.parameters(), lr=0.1), model)"
        )


def check_base(base: object) -> None:
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"base must be a torch.optim.Optimizer instance, got {base!r}; "
            "write SAM(torch.optim.SGD(model.parameters(), lr=0.1), model), or use sparsesam.compat.SAM"
        )
    if isinstance(base, torch.optim.LBFGS):
        raise TypeError(
            "base must not be LBFGS: it evaluates the closure several times within a step and compares the losses, "
            "which has no meaning while weights are perturbed; use a first-order optimizer such as SGD or AdamW"
        )
