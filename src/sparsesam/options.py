"""The options of an optimizer and of its parameter groups, and the checks of its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsesam.masks.mask import MaskRule
from sparsesam.perturbation import Norm, Radius, is_on_accelerator
from sparsesam.schedules import RhoSchedule
from sparsesam.utils.checks import check_choice, check_count, check_number, is_within

Ascent = Literal["explicit", "implicit", "implicit-dense"]
AscentScope = Literal["global", "local"]

_CALL = (
    "write SAM(torch.optim.SGD(model.parameters(), lr=0.1), model, rho=0.05). The call SAM(params, SGD, rho=0.05, "
    "lr=0.1) of davda54/sam and pytorch-optimizer, with first_step() and second_step(), is sparsesam.compat.SAM"
)


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `SharpnessAware` that hold for every step; see its docstring."""

    norm: Norm = "full"
    ascent: Ascent = "explicit"
    rho_schedule: RhoSchedule | None = None
    every: int = 1
    start: int = 0
    ascent_fraction: float = 1.0
    ascent_scope: AscentScope = "global"
    engine: bool = True
    ascent_steps: int = 1
    radius: Radius = "global"

    @cached_property
    def is_implicit(self) -> bool:
        return self.ascent != "explicit"

    def __post_init__(self) -> None:
        for name, choices in (("norm", Norm), ("ascent", Ascent), ("ascent_scope", AscentScope), ("radius", Radius)):
            check_choice(name, getattr(self, name), get_args(choices))
        check_count("ascent_steps", self.ascent_steps, "1 is SAM")
        check_count("every", self.every, "1 perturbs in every step")
        check_count("start", self.start, "it is the first step that ascends", least=0)
        if not isinstance(self.engine, bool):
            raise TypeError(f"engine must be True or False, got {self.engine!r}; False computes everything")
        if self.rho_schedule is not None and not callable(self.rho_schedule):
            raise TypeError(
                f"rho_schedule must be a function of the step, got {self.rho_schedule!r}; for example Cosine(steps)"
            )
        if not is_within(self.ascent_fraction, 0, 1) or self.ascent_fraction == 0:
            raise ValueError(f"ascent_fraction must be in (0, 1], got {self.ascent_fraction}; the paper tries 0.25")
        if self.ascent == "implicit" and self.norm == "full":
            raise ValueError(
                'norm must be "masked" with ascent="implicit", got "full": gradients outside the mask are not computed'
            )
        if self.is_implicit and not self.engine:
            raise ValueError(f"engine must be True with ascent={self.ascent!r}, whose gradients the engine computes")
        if self.ascent_steps > 1:
            why = "it holds for the first of several ascent steps only"
            self._refuse(f"ascent_steps={self.ascent_steps}", {"ascent": why, "ascent_scope": why})

    def _refuse(self, by: str, refused: Mapping[str, str]) -> None:
        """Raise for options, ``{option: why}``, that do not have their defaults."""
        defaults = {option.name: option.default for option in fields(self)}
        for option, why in refused.items():
            if getattr(self, option) != defaults[option]:
                raise ValueError(
                    f"{option} must be {defaults[option]!r} with {by}, got {getattr(self, option)!r}: {why}"
                )

    def check_method(self, method: str, passes: int, refused: Mapping[str, str]) -> None:
        """Raise for options that the method cannot have: those of a first pass, and ``refused``, {option: why}."""
        needing = ("ascent_fraction", "ascent_scope", "ascent", "ascent_steps") if passes == 1 else ()
        self._refuse(method, {**dict.fromkeys(needing, "it has no first pass"), **refused})

    def check_model(self, model: object) -> None:
        if self.ascent_scope == "local" and not isinstance(model, nn.parallel.DistributedDataParallel):
            raise ValueError(
                'model must be the DistributedDataParallel itself with ascent_scope="local", got '
                f"{type(model).__name__}"
            )
        if self.ascent_scope == "local" and getattr(model, "static_graph", False):
            raise ValueError(
                'model must not have static_graph=True with ascent_scope="local": DistributedDataParallel cannot skip '
                'the synchronization of its first backward; remove static_graph, or use ascent_scope="global"'
            )

    def check_mask(self, mask: object) -> None:
        if mask is None and self.is_implicit:
            raise ValueError(f"mask must be given with ascent={self.ascent!r}: the gradient passes through W ⊙ m")
        if mask is not None:
            require_mask_rule(mask)
        if isinstance(mask, MaskRule) and mask.needs_masked_norm and self.norm == "full":
            raise ValueError(
                f'norm must be "masked" with {type(mask).__name__}, got "full": the norm of every gradient costs '
                "what the mask saves"
            )


def require_mask_rule(mask: object) -> None:
    if not isinstance(mask, MaskRule):
        raise TypeError(
            f"mask must be a mask rule, got {mask!r}; for example fisher_mask(train_set, loss_fn, sparsity=0.5), "
            "dynamic_mask(...), random_mask(...) or fixed_mask({name: bool tensor})"
        )


def check_keywords(keywords: Mapping[str, object]) -> None:
    """Raise TypeError for those of other packages' optimizers."""
    if {"lr", "params", "base_optimizer"} & keywords.keys():
        raise TypeError(f"base must be a torch.optim.Optimizer instance, and model its nn.Module: {_CALL}")


def check_base_and_model(base: object, model: object) -> None:
    if not isinstance(base, Optimizer):
        raise TypeError(f"base must be a torch.optim.Optimizer instance, got {base!r}; {_CALL}")
    if isinstance(base, torch.optim.LBFGS):
        raise TypeError(
            "base must not be LBFGS: it evaluates the closure several times within a step and compares the losses, "
            "which has no meaning while weights are perturbed; use a first-order optimizer such as SGD or AdamW"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be the torch.nn.Module that the base optimizer trains, got {model!r}; {_CALL}")


# ---- parameter groups --------------------------------------------------------------------------------------------


def option_keys(base: Optimizer) -> dict[str, str]:
    """Returns the keys of our options in the base's parameter groups, by option.

    They have the prefix ``"sam_"`` where the base has an option of the same name: in a group of Adadelta, ``"rho"`` is
    Adadelta's and ``"sam_rho"`` is the radius of the perturbation.
    """
    names = ("rho", "adaptive", "eta", "perturb")
    return {name: f"sam_{name}" if name in base.defaults else name for name in names}


def check_group(group: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    """Raise ValueError for invalid options, naming their keys in the group."""
    rho, eta, adaptive = (group[keys[option]] for option in ("rho", "eta", "adaptive"))
    if not is_on_accelerator(rho):
        number = rho.item() if isinstance(rho, Tensor) else rho
        check_number(keys["rho"], number, "0 is the base optimizer, 0.05 is a usual start")
    check_number(keys["eta"], eta, "ASAM uses 0.01")
    if adaptive not in (False, True, "all", "layer"):
        raise ValueError(f'{keys["adaptive"]} must be False, True (weights only), "all" or "layer", got {adaptive!r}')


def scale_rho(group: dict[str, Any], key: str, factor: float) -> None:
    """Set rho to factor * its initial value."""
    now = group[key]
    first = group.setdefault(f"initial_{key}", now.clone() if isinstance(now, Tensor) else now)
    # In place, because a captured CUDA graph reads this tensor.
    group[key] = now.copy_(first * factor) if isinstance(now, Tensor) else first * factor
