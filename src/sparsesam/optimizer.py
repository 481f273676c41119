"""The optimizers: SAM perturbs every weight, SSAM those in its mask, ExtrapolatedSAM along the last update."""

from __future__ import annotations

import math
from typing import Literal, get_args

from torch import nn
from torch.optim import Optimizer

from sparsesam.ascent.kinds import Norm
from sparsesam.masks.mask import MaskRule
from sparsesam.schedules import RhoSchedule
from sparsesam.step.settings import AscentScope, OffSteps, Settings, require_mask_rule
from sparsesam.step.sharpness_aware import SharpnessAware
from sparsesam.utils.checks import check_choice

SAMAscent = Literal["explicit", "momentum", "momentum-climbing"]
SSAMAscent = Literal["explicit", "implicit", "implicit-dense", "momentum", "momentum-climbing"]


class SAM(SharpnessAware):
    """Implements sharpness-aware minimization, min_w max_{||e|| <= rho} f(w + e), around any first-order optimizer.

        e = rho * g / ||g||
        w <- base's update of w with the gradient at w + e

    Args:
        base: the optimizer that takes the step. Its parameter groups may hold ``rho``, ``adaptive``, ``eta`` and
            ``perturb=False`` of their own (as ``sam_rho`` and so on if the base has an option of that name, like
            Adadelta); a group that is not perturbed does not count in the norm.
        model: the module whose parameters ``base`` holds.
        rho: the length of e. Without a schedule, ``group["rho"]`` may be changed at any time.
        adaptive: ASAM, e = rho * T² g / ||T g|| with T = |w| + eta on weights and 1 on biases; ``"all"``: on biases
            too. It needs a rho about ten times larger.
        eta: the eta of ASAM.
        ascent: ``"momentum"`` is Momentum-SAM, e = -rho * v / ||v|| with v the base optimizer's momentum (Adam: the
            first moment). A step then takes one pass, at w + e, whose loss is returned and whose normalization
            statistics are kept; it needs a rho about five times larger. ``"momentum-climbing"`` has the opposite
            sign, an ablation that trains worse.
        rho_schedule: a function of the step that returns a factor on each group's initial rho, such as `Cosine`.
        every: ascend in every k-th step.
        off_steps: what the other steps do: ``"skip"``, the base optimizer's step; ``"reuse"``, one pass at w + the
            last e.
        start: the first step that ascends, counted from 0.
        ascent_fraction: ascend along the gradient of this part of the batch; needs ``step(closure, batch=...)``.
        ascent_scope: with DistributedDataParallel, ascend along the gradient averaged over all ranks, ``"global"``, or
            along each rank's own, ``"local"`` (m-sharpness), which is sent only in steps that make a mask from it.
        engine: ``False`` also computes what the perturbation does not need; the result is the same.

    Examples:
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> opt = sparsesam.SAM(base, model, rho=0.05)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = loss_fn(model(x), y)
        ...     loss.backward()
        ...     return loss
        >>> loss = opt.step(closure)  # the loss at w
    """

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        rho: float = 0.05,
        *,
        adaptive: bool | Literal["all"] = False,
        eta: float = 0.01,
        ascent: SAMAscent = "explicit",
        rho_schedule: RhoSchedule | None = None,
        every: int = 1,
        off_steps: OffSteps = "skip",
        start: int = 0,
        ascent_fraction: float = 1.0,
        ascent_scope: AscentScope = "global",
        engine: bool = True,
    ) -> None:
        check_choice("ascent", ascent, get_args(SAMAscent))
        settings = Settings(
            "full", ascent, rho_schedule, every, off_steps, start, ascent_fraction, ascent_scope, engine
        )
        super().__init__(base, model, settings, rho=rho, mask=None, adaptive=adaptive, eta=eta)


class SSAM(SharpnessAware):
    """Implements sparse SAM: only the weights where the mask m is 1 are perturbed.

        e = rho * m ⊙ g / ||g||            norm="full", the paper's
        e = rho * m ⊙ g / ||m ⊙ g||        norm="masked": gradients outside the mask need not be computed

    The paper's first mask is random; here SSAM-F measures Fisher information before the first step.

    Args:
        base: as in `SAM`, and so are the arguments that are not listed.
        model: as in `SAM`.
        rho: as in `SAM`; with ``norm="full"`` e is shorter, by the factor ||m ⊙ g|| / ||g||.
        mask: which weights to perturb: `fisher_mask` (SSAM-F), `dynamic_mask` (SSAM-D), `random_mask`,
            `fixed_mask`, `budget_mask`, or a `Mask` composed of a score, a pattern and a refresh rule.
        norm: ``"full"`` or ``"masked"``.
        ascent: ``"explicit"`` masks the gradient. ``"implicit"`` also computes the ascent's input gradients with the
            masked weights of linear and convolution layers, dX = dY · (W ⊙ m); ``"implicit-dense"`` does only that and
            perturbs every weight along the result (the paper's form). ``"momentum"`` is as in `SAM`.

    Examples:
        >>> mask = sparsesam.fisher_mask(train_set, loss_fn, sparsity=0.5, samples=16)
        >>> opt = sparsesam.SSAM(base, model, rho=0.1, mask=mask)
        >>> loss = opt.step(closure)
        >>> round(opt.sparsity, 2)
        0.5
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
        ascent: SSAMAscent = "explicit",
        rho_schedule: RhoSchedule | None = None,
        every: int = 1,
        off_steps: OffSteps = "skip",
        start: int = 0,
        ascent_fraction: float = 1.0,
        ascent_scope: AscentScope = "global",
        engine: bool = True,
    ) -> None:
        require_mask_rule(mask)
        check_choice("ascent", ascent, get_args(SSAMAscent))
        settings = Settings(norm, ascent, rho_schedule, every, off_steps, start, ascent_fraction, ascent_scope, engine)
        super().__init__(base, model, settings, rho=rho, mask=mask, adaptive=adaptive, eta=eta)


class ExtrapolatedSAM(SharpnessAware):
    """Implements sharpness-awareness in one pass: the perturbation is k times the last update of the base optimizer.

        e = k * m ⊙ (w - w_before)
        w <- base's update of w with the gradient at w + e

    There is no norm and no rho, and the base optimizer's state is not used: e shrinks with the learning rate. The first
    step, and a step after one that a GradScaler skipped, is a plain step of the base. The returned loss and the running
    statistics are those at w + e, which becomes w as the learning rate decays. It needs as much memory as SAM, 4 bytes
    per perturbed weight.

    Related: super-acceleration (Nakerst, Brennan, Haque 2020) looks several steps of SGD's momentum ahead to converge
    faster; extrapolation from the past (Popov 1980; Lin et al. 2020 for large batches) follows the last gradient;
    Momentum-SAM fixes the length, here ``SAM(ascent="momentum")``. The Lookahead optimizer (Zhang et al. 2019),
    Lookahead-SAM (Yu et al. 2024) and LookSAM (Liu et al. 2022) are other methods.

    Args:
        base: any optimizer.
        model: the module whose parameters ``base`` holds.
        steps_ahead: k. For networks with batch normalization 40 to 110 if labels are noisy, 2 to 40 if they are clean;
            5 to 20 for other networks, which do not train with much more; about 1 is Nesterov's look-ahead. It is
            stored in the parameter groups as ``rho``, where it may differ by group and be changed.
        mask: as in `SSAM`; only the updates of perturbed weights are kept. A mask that is made from gradients
            (`dynamic_mask`, `GradientMagnitude`) uses the base optimizer's momentum instead.
        schedule: a function of the step that returns a factor on ``steps_ahead``.
        every: as in `SAM`.
        start: as in `SAM`.

    Examples:
        >>> opt = sparsesam.ExtrapolatedSAM(base, model, steps_ahead=20)
        >>> loss = opt.step(closure)  # calls the closure once
    """

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        steps_ahead: float = 10.0,
        *,
        mask: MaskRule | None = None,
        schedule: RhoSchedule | None = None,
        every: int = 1,
        start: int = 0,
    ) -> None:
        if not isinstance(steps_ahead, int | float) or not 0 <= steps_ahead < math.inf:
            raise ValueError(
                f"steps_ahead must be a finite number of at least 0, got {steps_ahead}; 0 is the base optimizer, 10 to "
                "110 are usual"
            )
        if mask is not None:
            require_mask_rule(mask)
        settings = Settings("masked", "extrapolation", schedule, every=every, start=start)
        super().__init__(base, model, settings, rho=steps_ahead, mask=mask, adaptive=False, eta=0.01)
