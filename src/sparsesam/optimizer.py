"""The optimizers: SAM perturbs every weight, SSAM those that its mask keeps, ExtrapolatedSAM by the last update."""

from __future__ import annotations

import math
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from sparsesam.ascent.plan import Norm
from sparsesam.masks.mask import MaskRule
from sparsesam.parameters import check_model
from sparsesam.schedules import RhoSchedule
from sparsesam.settings import AscentScope, OffSteps, Settings, require_mask_rule
from sparsesam.sharpness_aware import SharpnessAware


class SAM(SharpnessAware):
    """Sharpness-aware minimization: min_w max_{||e|| <= rho} f(w + e), one ascent step for the inner maximum.

        e = rho * g / ||g||,    w <- base's update of w with the gradient at w + e

    ``adaptive=True`` is ASAM: e = rho * T² g / ||T g|| with T = |w| + eta on weights and 1 on biases
    (``"all"``: on biases too); it needs a rho about ten times larger. ``rho``, ``adaptive``, ``eta`` and
    ``perturb=False`` may stand in the base optimizer's parameter groups (as ``sam_rho`` and so on where the base has an
    option of that name itself, like Adadelta); a group that is not perturbed does not count in the norm.
    ``rho_schedule`` multiplies each group's first rho; without one, ``group["rho"]`` is yours to change.

    To pay for fewer ascents: ``every=k`` ascends in every k-th step, and in between takes the base optimizer's step
    or, with ``off_steps="reuse"``, one pass at w + the last e; ``start=t`` begins with step t; ``ascent_fraction=0.25``
    ascends by a quarter of the batch. ``engine=False`` computes everything, also what no perturbation needs.

    ``ascent="momentum"`` is Momentum-SAM: e = -rho * v / ||v|| with v the base optimizer's momentum (Adam and its kin:
    the first moment), *ahead* along the coming steps. It takes no pass of its own, so a step costs what the base's
    costs, and needs a rho about five times larger than SAM. ``"momentum-climbing"`` is the opposite sign, an
    ablation that trains worse. In such steps of one pass the loss returned is that at w + e, and normalization
    statistics are those of w + e as well.

    With DistributedDataParallel the ascent follows the gradient of all ranks; ``ascent_scope="local"`` follows each
    rank's own, which sends nothing (m-sharpness, with m the batch of a rank) but in steps that make a mask from it.
    """

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        rho: float = 0.05,
        *,
        adaptive: bool | Literal["all"] = False,
        eta: float = 0.01,
        ascent: Literal["explicit", "momentum", "momentum-climbing"] = "explicit",
        rho_schedule: RhoSchedule | None = None,
        every: int = 1,
        off_steps: OffSteps = "skip",
        start: int = 0,
        ascent_fraction: float = 1.0,
        ascent_scope: AscentScope = "global",
        engine: bool = True,
    ) -> None:
        settings = Settings(
            norm="full",
            ascent=ascent,
            rho_schedule=rho_schedule,
            every=every,
            off_steps=off_steps,
            start=start,
            ascent_fraction=ascent_fraction,
            ascent_scope=ascent_scope,
            engine=engine,
        )
        super().__init__(base, model, settings, rho=rho, mask=None, adaptive=adaptive, eta=eta)


class SSAM(SharpnessAware):
    """Sparse SAM: the perturbation is kept only where the mask is 1.

        e = rho * m ⊙ g / ||g||            norm="full", the paper's
        e = rho * m ⊙ g / ||m ⊙ g||        norm="masked": gradients outside the mask need not be computed

    ``mask`` comes from `fisher_mask` (SSAM-F), `dynamic_mask` (SSAM-D), `random_mask`, `fixed_mask`, or is put
    together by hand from a score, a pattern and a refresh rule.

    ``ascent="explicit"`` masks the gradient. ``"implicit"`` also sends the ascent's gradient through the masked
    weights of linear and convolution layers, dX = dY · (W ⊙ m); ``"implicit-dense"`` does only that and perturbs
    every weight by the result (the paper's form). Everything else is as in `SAM`.

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
        ascent: Literal["explicit", "implicit", "implicit-dense", "momentum", "momentum-climbing"] = "explicit",
        rho_schedule: RhoSchedule | None = None,
        every: int = 1,
        off_steps: OffSteps = "skip",
        start: int = 0,
        ascent_fraction: float = 1.0,
        ascent_scope: AscentScope = "global",
        engine: bool = True,
    ) -> None:
        require_mask_rule(mask)
        settings = Settings(
            norm=norm,
            ascent=ascent,
            rho_schedule=rho_schedule,
            every=every,
            off_steps=off_steps,
            start=start,
            ascent_fraction=ascent_fraction,
            ascent_scope=ascent_scope,
            engine=engine,
        )
        super().__init__(base, model, settings, rho=rho, mask=mask, adaptive=adaptive, eta=eta)


class ExtrapolatedSAM(SharpnessAware):
    """Sharpness-awareness at the base optimizer's price: the gradient is taken ``steps_ahead`` = k last updates ahead,

        e = k * m ⊙ (w - w_before),    w <- base's update of w with the gradient at w + e

    in one pass per step, with every base optimizer, because nothing of it but the weights is looked at. There is no
    norm and no rho: the perturbation shrinks with the learning rate by itself. k near 1 is Nesterov's look-ahead;
    sharpness-awareness needs k of 40 to 110 for networks with batch normalization, and of 5 to 20 for others, which do
    not train with much more. Without a number it is 60 where the model has a batch normalization, else 10. ``mask``
    perturbs some entries only (as in `SSAM`), and only their updates are kept: the memory is that of SAM, 4 bytes for
    each perturbed weight. A mask that is made from gradients (`dynamic_mask`, `GradientMagnitude`) sees the base's
    momentum.

    k stands in the parameter groups as ``rho``, where it may differ by group and be changed; ``schedule`` multiplies it
    over the steps, ``every`` and ``start`` are `SAM`'s. The first step, and one after a step that a GradScaler skipped,
    is the base's own. The loss returned is that at w + e, and so are normalization statistics: they are those of w once
    the learning rate has decayed.

    Relatives: super-acceleration (Nakerst, Brennan, Haque 2020) looks several steps of SGD's momentum ahead to converge
    faster; extrapolation from the past (Popov 1980; Lin et al. 2020 for large batches) goes along the last gradient;
    Momentum-SAM fixes the length, here ``SAM(ascent="momentum")``. Not to be mistaken for the Lookahead optimizer
    (Zhang et al. 2019), Lookahead-SAM (Yu et al. 2024) or LookSAM (Liu et al. 2022).
    """

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        steps_ahead: float | None = None,
        *,
        mask: MaskRule | None = None,
        schedule: RhoSchedule | None = None,
        every: int = 1,
        start: int = 0,
    ) -> None:
        if steps_ahead is None:
            steps_ahead = default_steps_ahead(model)
        if not isinstance(steps_ahead, int | float) or not 0 <= steps_ahead < math.inf:
            raise ValueError(
                f"steps_ahead must be a finite number of at least 0, got {steps_ahead}; 0 is the base optimizer, 10 to "
                "110 are usual"
            )
        if mask is not None:
            require_mask_rule(mask)
        settings = Settings("masked", "extrapolation", schedule, every=every, start=start, engine=False)
        super().__init__(base, model, settings, rho=steps_ahead, mask=mask, adaptive=False, eta=0.01)


def default_steps_ahead(model: nn.Module) -> float:
    """Where a search begins (docs/study.md). Networks without batch normalization do not bear as long a step."""
    check_model(model)
    has_batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    return 60.0 if has_batch_norm else 10.0
