"""Methods of one pass: along the base optimizer's momentum, or its last update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsesam.ascent import Step
from sparsesam.masks.mask import MaskRule
from sparsesam.perturbation import Target, entries_of
from sparsesam.sam import SharpnessAware
from sparsesam.schedules import RhoSchedule
from sparsesam.wrapper import PerturbedParam, PerturbedParams

#: State keys of the momentum in torch's optimizers: SGD, RMSprop, Muon; Adam and its variants.
_MOMENTUM = ("momentum_buffer", "exp_avg")
_REMEDY = (
    "give the base a momentum (SGD, RMSprop and Muon: momentum=0.9; Adam and its variants have one), or use "
    "ExtrapolatedSAM, which works with every base, without a mask made from gradients"
)


class OnePass(SharpnessAware):
    """Base class of methods that need no gradient at w; masks made from gradients use the momentum instead."""

    def passes(self) -> int:
        return 1

    def direction(self, params: PerturbedParams) -> dict[str, Tensor]:
        """Returns the base optimizer's momentum; nothing before its first step."""
        states = {p.name: self.base.state.get(p.parameter, {}) for p in params}
        found = {
            name: next((s[key] for key in _MOMENTUM if s.get(key) is not None), None) for name, s in states.items()
        }
        kept = sorted({str(key) for state in states.values() for key in state})
        if kept and not set(kept) & set(_MOMENTUM):
            raise ValueError(
                f"base must have a momentum, but {type(self.base).__name__} keeps only {', '.join(kept)} for its "
                f"parameters; {_REMEDY}"
            )
        return {name: momentum for name, momentum in found.items() if momentum is not None}


def require_momentum(base: Optimizer) -> None:
    momenta = [group["momentum"] for group in base.param_groups if "momentum" in group]
    if momenta and not any(momenta):
        raise ValueError(f"base must have a momentum, got {type(base).__name__} with momentum=0; {_REMEDY}")


class MomentumSAM(OnePass):
    """Implements Momentum-SAM (Becker, Altrock, Risse 2024): SAM in one pass, ahead along the momentum.

        e = -rho * v / ||v||

    v is the momentum buffer of the base: an average of gradients, so that the perturbation goes in the direction of the
    next steps. For Adam and its variants it is the first moment, not divided by the root of the second. The returned
    loss and the running statistics are those at w + e. It needs a rho about five times larger than SAM's. The weights
    are back at w after every step, which is not so in the authors' code. Options of a first pass raise an error.

    Examples:
        >>> opt = sparsesam.MomentumSAM(base, model, rho=0.25)
        >>> loss = opt.minimize(lambda: loss_fn(model(x), y))  # calls the function once
    """

    def __init__(self, base: Optimizer, model: nn.Module, rho: float = 0.25, **options: Any) -> None:
        super().__init__(base, model, rho, **options)
        require_momentum(base)

    def signed_rho(self, param: PerturbedParam) -> float | Tensor:
        return -param.rho  # also with maximize: the momentum consists of reversed gradients


class ExtrapolatedSAM(OnePass):
    """Implements sharpness-awareness in one pass: the perturbation is a multiple of the base optimizer's last update.

        e = k * m ⊙ (w - w_before),    k = 200 rho
        w <- base's update of w with the gradient at w + e

    There is no norm, and the base optimizer's state is not used: e shrinks with the learning rate. The factor 200 makes
    the best rho that of SAM, within a factor of two on ten of thirteen tasks (docs/study.md). The first
    step, and a step after one that a GradScaler skipped, is a plain step of the base. The returned loss and the running
    statistics are those at w + e, which becomes w as the learning rate decays. It needs as much memory as SAM, 4 bytes
    per perturbed weight.

    Related: super-acceleration (Nakerst, Brennan, Haque 2020) looks several steps of SGD's momentum ahead to converge
    faster; extrapolation from the past (Popov 1980; Lin et al. 2020 for large batches) follows the last gradient;
    `MomentumSAM` fixes the length. The Lookahead optimizer (Zhang et al. 2019), Lookahead-SAM (Yu et al. 2024) and
    LookSAM (Liu et al. 2022) are other methods.

    Args:
        base: any optimizer.
        model: the module whose parameters ``base`` holds.
        rho: the strength. Networks without batch normalization do not train with much more than 0.1; 0.005 looks one
            update ahead, as Nesterov's method does.
        mask: as in `SSAM`; only the updates of perturbed weights are kept.
        rho_schedule: as in `SAM`.
        every: as in `SAM`.
        start: as in `SAM`.

    Examples:
        >>> opt = sparsesam.ExtrapolatedSAM(base, model, rho=0.05)
        >>> loss = opt.minimize(lambda: loss_fn(model(x), y))  # calls the function once
    """

    #: Updates to look ahead for a rho of 1.
    updates_per_rho = 200
    #: w_before - w. While the weights are perturbed, the same memory holds w.
    saved_tensors = {"back": "kept"}  # noqa: RUF012

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        rho: float = 0.05,
        *,
        mask: MaskRule | None = None,
        rho_schedule: RhoSchedule | None = None,
        every: int = 1,
        start: int = 0,
    ) -> None:
        options: dict[str, Any] = {"rho_schedule": rho_schedule, "every": every, "start": start}
        super().__init__(base, model, rho, mask=mask, norm="masked", **options)
        if self.own.masks.needs_gradient:  # which is the momentum here
            require_momentum(base)

    @property
    def last_update_norm(self) -> float | None:
        """||w - w_before|| of the perturbed weights; None if no update is recorded."""
        back = self.own.tensors["back"].values()
        return float(torch.stack([part.norm() for part in back]).norm()) if back else None

    def signed_rho(self, param: PerturbedParam) -> float | Tensor:
        return self.updates_per_rho * param.rho

    def ascend(self, step: Step) -> None:
        back = self.own.tensors["back"]
        groups: dict[float, list[Target]] = {}
        for target in self._tracked(step):
            if target.rho != 0 and target.name in back:
                groups.setdefault(float(target.rho), []).append(target)
        for k, targets in groups.items():
            weights = entries_of(targets)
            buffers = [back.pop(t.name).to(w).view(w.shape) for t, w in zip(targets, weights, strict=True)]
            ahead = torch._foreach_sub(weights, buffers, alpha=k)
            torch._foreach_copy_(buffers, weights)
            step.kept.update(zip([target.name for target in targets], buffers, strict=True))
            self._perturbation.move_to(targets, ahead, saved=buffers)
        self.own.counters.skipped_ascents += not groups and any(target.rho for target in self._tracked(step))

    def update(self) -> None:
        step, back = self._step, self.own.tensors["back"]
        assert step is not None, "an update ends a step"
        # The difference is needed only if the next step is perturbed.
        tracked = self._tracked(step) if self._ascends(self.steps + 1) else []
        for target, weight in zip(tracked, entries_of(tracked), strict=True):
            if target.name not in step.kept:
                old = back.pop(target.name, None)
                fits = old is not None and old.shape == weight.shape and old.dtype == weight.dtype
                step.kept[target.name] = old.copy_(weight) if old is not None and fits else weight.clone()
        super().update()
        buffers = [step.kept[target.name] for target in tracked]
        if buffers:
            torch._foreach_sub_(buffers, entries_of(tracked))
        self.own.tensors["back"] = dict(zip([target.name for target in tracked], buffers, strict=True))

    def _tracked(self, step: Step) -> list[Target]:
        targets = (self.target(step, p, p.parameter) for p in step.params)
        return [target for target in targets if target.mask is None or not target.mask.is_empty]
