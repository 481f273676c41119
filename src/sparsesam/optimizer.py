"""The two optimizers: SAM perturbs every weight, SSAM those that its mask keeps."""

from __future__ import annotations

from typing import Literal

from torch import nn
from torch.optim import Optimizer

from sparsesam.ascent.plan import Ascent, Norm
from sparsesam.ascent_schedule import AscentSchedule, OffSteps
from sparsesam.masks.mask import MaskRule
from sparsesam.schedules import RhoSchedule
from sparsesam.sharpness_aware import AscentScope, SharpnessAware


class SAM(SharpnessAware):
    """Sharpness-aware minimization: min_w max_{||e|| <= rho} f(w + e), one ascent step for the inner maximum.

        e = rho * g / ||g||,    w <- base's update of w with the gradient at w + e

    ``adaptive=True`` is ASAM: e = rho * T² g / ||T g|| with T = |w| + eta on weights and 1 on biases
    (``"all"``: on biases too); it wants a rho about ten times larger. ``rho``, ``adaptive``, ``eta`` and
    ``perturb=False`` may stand in the base optimizer's parameter groups; a group that is not perturbed does not
    count in the norm. ``rho_schedule`` multiplies each group's first rho; without one, ``group["rho"]`` is yours
    to change.

    To pay for fewer ascents: ``every=k`` ascends in every k-th step, and in between takes the base optimizer's step
    or, with ``off_steps="reuse"``, one pass at w + the last e; ``start=t`` begins with step t; ``ascent_fraction=0.25``
    ascends by a quarter of the batch; ``ascent="momentum"`` follows the base optimizer's momentum instead of a
    gradient, which takes no pass at all. ``engine=False`` computes everything, also what no perturbation needs.

    With DistributedDataParallel the ascent follows the gradient of all ranks; ``ascent_scope="local"`` follows each
    rank's own, which sends nothing (m-sharpness, with m the batch of a rank).
    """

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        rho: float = 0.05,
        *,
        adaptive: bool | Literal["all"] = False,
        eta: float = 0.01,
        ascent: Literal["explicit", "momentum"] = "explicit",
        rho_schedule: RhoSchedule | None = None,
        every: int = 1,
        off_steps: OffSteps = "skip",
        start: int = 0,
        ascent_fraction: float = 1.0,
        ascent_scope: AscentScope = "global",
        engine: bool = True,
    ) -> None:
        super().__init__(
            base,
            model,
            rho=rho,
            mask=None,
            adaptive=adaptive,
            eta=eta,
            norm="full",
            ascent=ascent,
            rho_schedule=rho_schedule,
            schedule=AscentSchedule(every, off_steps, start),
            ascent_fraction=ascent_fraction,
            ascent_scope=ascent_scope,
            engine=engine,
        )


class SSAM(SharpnessAware):
    """Sparse SAM: the perturbation is kept only where the mask is 1.

        e = rho * m ⊙ g / ||g||            norm="full", the paper's
        e = rho * m ⊙ g / ||m ⊙ g||        norm="masked": gradients outside the mask need not be computed

    ``mask`` comes from `fisher_mask` (SSAM-F), `dynamic_mask` (SSAM-D), `random_mask`, `fixed_mask`, or is put
    together by hand from a score, a pattern and a refresh rule.

    ``ascent="explicit"`` masks the gradient. ``"implicit"`` also sends the ascent's gradient through the masked
    weights of linear and convolution layers, dX = dY · (W ⊙ m); ``"implicit-dense"`` does only that and perturbs
    every weight by what comes out (the paper's form). Everything else is as in `SAM`.

    The paper leaves the first mask to chance; here SSAM-F measures Fisher before the first step.
    """

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        rho: float = 0.05,
        *,
        mask: MaskRule,
        adaptive: bool | Literal["all"] = False,
        eta: float = 0.01,
        norm: Norm = "full",
        ascent: Ascent = "explicit",
        rho_schedule: RhoSchedule | None = None,
        every: int = 1,
        off_steps: OffSteps = "skip",
        start: int = 0,
        ascent_fraction: float = 1.0,
        ascent_scope: AscentScope = "global",
        engine: bool = True,
    ) -> None:
        if not isinstance(mask, MaskRule):
            raise TypeError(
                f"mask must be a mask rule, got {mask!r}; for example fisher_mask(train_set, loss_fn, sparsity=0.5), "
                "dynamic_mask(...), random_mask(...) or fixed_mask({name: bool tensor})"
            )
        super().__init__(
            base,
            model,
            rho=rho,
            mask=mask,
            adaptive=adaptive,
            eta=eta,
            norm=norm,
            ascent=ascent,
            rho_schedule=rho_schedule,
            schedule=AscentSchedule(every, off_steps, start),
            ascent_fraction=ascent_fraction,
            ascent_scope=ascent_scope,
            engine=engine,
        )
