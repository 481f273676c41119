"""The parameter groups: names of their parameters, the options that sparsesam adds, and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsesam.perturbation import is_on_accelerator


def option_keys(base: Optimizer) -> dict[str, str]:
    """Returns the parameter group keys of our options.

    A key is the option's name, with the prefix ``"sam_"`` if the base optimizer has an option of the same name: in a
    group of Adadelta, ``"rho"`` is Adadelta's and ``"sam_rho"`` is the radius of the perturbation.
    """
    names = ("rho", "adaptive", "eta", "perturb")
    return {name: f"sam_{name}" if name in base.defaults else name for name in names}


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


def scale_rho(group: dict[str, Any], key: str, factor: float) -> None:
    """Set rho to factor * its initial value."""
    now = group[key]
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
            f"{keys['rho']} must be a finite number of at least 0, got {rho}; 0 is the base optimizer, 0.05 is a usual "
            "start"
        )
    if not isinstance(eta, int | float) or not 0 <= eta < math.inf:
        raise ValueError(f"{keys['eta']} must be a finite number of at least 0, got {eta}; ASAM uses 0.01")
    if adaptive not in (False, True, "all", "layer"):
        raise ValueError(f'{keys["adaptive"]} must be False, True (weights only), "all" or "layer", got {adaptive!r}')


def check_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise TypeError for the signature of other packages, ``SAM(params, SGD, rho=…, lr=…)``."""
    takes_class = any(
        isinstance(given, type) for given in (*args[:2], kwargs.get("base"), kwargs.get("base_optimizer"))
    )
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
