"""The options of an optimizer that hold for every step, validated at construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from torch import nn

from sparsesam.masks.mask import MaskRule
from sparsesam.perturbation import Norm, Radius
from sparsesam.schedules import RhoSchedule
from sparsesam.utils.checks import check_choice, check_count, is_within

Ascent = Literal["explicit", "implicit", "implicit-dense"]
AscentScope = Literal["global", "local"]


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `SharpnessAware`; see its docstring."""

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
    is_implicit: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_implicit", self.ascent != "explicit")
        check_choice("norm", self.norm, get_args(Norm))
        check_choice("ascent", self.ascent, get_args(Ascent))
        check_choice("ascent_scope", self.ascent_scope, get_args(AscentScope))
        check_choice("radius", self.radius, get_args(Radius))
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
        for option, only in (("ascent", "explicit"), ("ascent_scope", "global")):
            if self.ascent_steps > 1 and getattr(self, option) != only:
                raise ValueError(
                    f"{option} must be {only!r} with ascent_steps={self.ascent_steps}, got {getattr(self, option)!r}: "
                    "it holds for the first of several ascent steps only"
                )

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

    def check_method(self, method: str, passes: int, refused: Mapping[str, str]) -> None:
        """Raise for options that the method cannot have: those of a first pass, and ``refused``, {option: why}."""
        if passes == 1:
            needing = ("ascent_fraction", "ascent_scope", "ascent", "ascent_steps")
            refused = {**dict.fromkeys(needing, "it has no first pass"), **refused}
        defaults = {option.name: option.default for option in fields(self)}
        for option, why in refused.items():
            value, default = getattr(self, option), defaults[option]
            if value != default:
                raise ValueError(f"{option} must be {default!r} with {method}, got {value!r}: {why}")


def require_mask_rule(mask: object) -> None:
    if not isinstance(mask, MaskRule):
        raise TypeError(
            f"mask must be a mask rule, got {mask!r}; for example fisher_mask(train_set, loss_fn, sparsity=0.5), "
            "dynamic_mask(...), random_mask(...) or fixed_mask({name: bool tensor})"
        )
