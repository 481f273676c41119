"""Which parameters there are, under which names, and with which options."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

#: Options that each parameter group carries beside the base optimizer's own.
GROUP_OPTIONS = ("rho", "adaptive", "eta", "perturb")


class PerturbedParam(NamedTuple):
    """A parameter that takes part in the ascent."""

    name: str
    parameter: Tensor
    group: dict[str, Any]

    @property
    def eta(self) -> float | None:
        """ASAM's eta where T = |w| + eta applies, None where T = 1. Biases keep T = 1, as in its paper."""
        adaptive = self.group["adaptive"]
        is_bias = self.name.rpartition(".")[2].endswith("bias")
        if adaptive == "all" or (adaptive and not is_bias):
            return float(self.group["eta"])
        return None


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def named(model: nn.Module, base: Optimizer) -> dict[Tensor, str]:
    """The names of the optimizer's parameters; each must be one of the model's."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    optimized = [parameter for group in base.param_groups for parameter in group["params"]]
    strangers = sum(parameter not in names for parameter in optimized)
    if not names or not optimized:
        raise ValueError(
            f"model must have parameters to train, got {type(model).__name__} with {len(names)} parameters "
            f"and an optimizer with {len(optimized)}"
        )
    if strangers:
        raise ValueError(
            f"model must own every parameter of the base optimizer, but {strangers} of {len(optimized)} are not in "
            f"{type(model).__name__}; pass the model the optimizer was made for, or an nn.ModuleList of all of them"
        )
    return names


def perturbed_params(base: Optimizer, names: dict[Tensor, str]) -> Iterator[PerturbedParam]:
    """Trainable parameters of the groups that are perturbed."""
    for group in base.param_groups:
        if group["perturb"]:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    yield PerturbedParam(names[parameter], parameter, group)


def check_group(group: dict[str, Any]) -> None:
    rho, eta, adaptive = group["rho"], group["eta"], group["adaptive"]
    if isinstance(rho, Tensor):
        rho = rho.item()
    if not isinstance(rho, int | float) or not 0 <= rho < math.inf:
        raise ValueError(
            f"rho must be a finite number of at least 0, got {rho}; 0 is the base optimizer, 0.05 a usual start"
        )
    if not isinstance(eta, int | float) or not 0 <= eta < math.inf:
        raise ValueError(f"eta must be a finite number of at least 0, got {eta}; ASAM uses 0.01")
    if adaptive not in (False, True, "all"):
        raise ValueError(f'adaptive must be False, True (weights only) or "all", got {adaptive!r}')


def check_base(base: object) -> None:
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"base must be a torch.optim.Optimizer instance, got {base!r}; "
            "write SAM(torch.optim.SGD(model.parameters(), lr=0.1), model)"
        )
    if isinstance(base, torch.optim.LBFGS):
        raise TypeError(
            "base must not be LBFGS: it evaluates the closure several times within a step and compares the losses, "
            "which has no meaning while weights are perturbed; use a first-order optimizer such as SGD or AdamW"
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
