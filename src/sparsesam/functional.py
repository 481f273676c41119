"""The sharpness-aware gradient as a pure function of the parameters, for torch.func.

    e = rho * m ⊙ g / ||g||            norm="full", the paper's
    e = rho * m ⊙ g / ||m ⊙ g||        norm="masked"

The gradient is taken at w + e. Where g is zero, e is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from sparsesam.perturbation import Norm
from sparsesam.utils.checks import check_choice, check_like_parameters

Params = Mapping[str, Tensor]


def perturbation(
    gradients: Params, *, rho: float, masks: Mapping[str, Tensor] | None = None, norm: Norm = "full"
) -> dict[str, Tensor]:
    """Returns e of the equations above, ``{name: tensor}``; a parameter without a mask is perturbed as a whole."""
    check_choice("norm", norm, get_args(Norm))
    if not rho >= 0:
        raise ValueError(f"rho must be at least 0, got {rho}; 0 is the plain gradient, 0.05 is a usual start")
    check_like_parameters("masks", masks or {}, gradients)
    masked = {name: g * masks[name].to(g.dtype) if masks and name in masks else g for name, g in gradients.items()}
    counted = gradients if norm == "full" else masked
    squares = torch.stack([g.square().sum() for g in counted.values()]).sum()
    scale = torch.where(squares > 0, rho * squares.clamp_min(torch.finfo(squares.dtype).tiny).rsqrt(), 0.0)
    return {name: scale * g for name, g in masked.items()}


def sharpness_aware_grad(
    loss: Callable[..., Tensor],
    *,
    rho: float = 0.05,
    masks: Mapping[str, Tensor] | None = None,
    norm: Norm = "full",
) -> Callable[..., tuple[dict[str, Tensor], Tensor]]:
    """Returns a function with the arguments of ``loss`` that returns the gradient at w + e and the loss at w.

    The first argument of ``loss`` is a dictionary of parameters; see `torch.func.functional_call`. It replaces
    `torch.func.grad_and_value`, and composes with ``vmap``, ``torch.compile`` and further differentiation.
    """

    def gradient(params: Params, *args: Any, **kwargs: Any) -> tuple[dict[str, Tensor], Tensor]:
        first, value = torch.func.grad_and_value(loss)(params, *args, **kwargs)
        e = perturbation(first, rho=rho, masks=masks, norm=norm)
        perturbed = {name: w + e[name] for name, w in params.items()}
        return torch.func.grad(loss)(perturbed, *args, **kwargs), value

    return gradient
