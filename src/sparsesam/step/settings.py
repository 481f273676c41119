"""The settings of an optimizer, validated at construction, and which steps ascend."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from sparsesam.ascent.kinds import ONE_PASS, Ascent, Norm
from sparsesam.masks.mask import MaskRule
from sparsesam.schedules import RhoSchedule
from sparsesam.utils.checks import check_choice, check_count, is_within

AscentScope = Literal["global", "local"]
OffSteps = Literal["skip", "reuse"]


class StepKind(enum.Enum):
    ASCEND = enum.auto()  # two passes
    REUSE = enum.auto()  # one pass, at w + the last e
    PLAIN = enum.auto()  # one pass, at w


@dataclass(frozen=True)
class Settings:
    """The arguments of `SAM` and `SSAM` that hold for every step; see their docstrings."""

    norm: Norm
    ascent: Ascent
    rho_schedule: RhoSchedule | None = None
    every: int = 1
    off_steps: OffSteps = "skip"
    start: int = 0
    ascent_fraction: float = 1.0
    ascent_scope: AscentScope = "global"
    engine: bool = True

    def __post_init__(self) -> None:
        check_choice("norm", self.norm, get_args(Norm))
        check_choice("ascent_scope", self.ascent_scope, get_args(AscentScope))
        check_choice("off_steps", self.off_steps, get_args(OffSteps))
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
        if self.ascent in ONE_PASS and (self.ascent_fraction < 1 or self.off_steps == "reuse"):
            what = f"ascent_fraction={self.ascent_fraction}" if self.ascent_fraction < 1 else 'off_steps="reuse"'
            raise ValueError(f"{what} has no use with ascent={self.ascent!r}, which has no first pass; leave it out")
        if self.ascent == "implicit" and self.norm == "full":
            raise ValueError(
                'norm must be "masked" with ascent="implicit", got "full": gradients outside the mask are not computed'
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

    def check_mask(self, mask: MaskRule | None) -> None:
        if mask is not None and mask.needs_masked_norm and self.norm == "full":
            raise ValueError(
                f'norm must be "masked" with {type(mask).__name__}, got "full": the norm of every gradient costs '
                "what the mask saves"
            )

    @property
    def follows_momentum(self) -> bool:
        return self.ascent in ("momentum", "momentum-climbing")

    @property
    def is_implicit(self) -> bool:
        return self.ascent in ("implicit", "implicit-dense")

    @property
    def why_no_engine(self) -> str | None:
        """Why no step can leave anything out; None: it may."""
        if self.ascent in ONE_PASS:
            return "a step has only one pass"
        return None if self.engine else "switched off (engine=False)"

    def kind_of(self, step: int, *, has_last: bool) -> StepKind:
        """Returns the kind of step 0, 1, 2, …; ``has_last``: there is a last perturbation to reuse."""
        if step >= self.start and (step - self.start) % self.every == 0:
            return StepKind.ASCEND
        if step < self.start or self.off_steps == "skip":
            return StepKind.PLAIN
        return StepKind.REUSE if has_last else StepKind.ASCEND  # there is none yet, or a mask refresh dropped it

    def needs_first_pass(self, kind: StepKind) -> bool:
        """Whether a step of this kind needs a gradient at w."""
        return kind is StepKind.ASCEND and self.ascent not in ONE_PASS


def require_mask_rule(mask: object) -> None:
    if not isinstance(mask, MaskRule):
        raise TypeError(
            f"mask must be a mask rule, got {mask!r}; for example fisher_mask(train_set, loss_fn, sparsity=0.5), "
            "dynamic_mask(...), random_mask(...) or fixed_mask({name: bool tensor})"
        )
