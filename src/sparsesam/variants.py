"""Other methods of the family, each a small subclass: another direction, another gradient for the update.

| class             | what it changes                                                      | passes |
|-------------------|----------------------------------------------------------------------|--------|
| `MomentumSAM`     | the direction: against the base optimizer's momentum                 | 1      |
| `ExtrapolatedSAM` | the direction and its length: the base optimizer's last update       | 1      |
| `GSAM`            | the update: less of the gradient at w that is orthogonal to SAM's    | 2      |
| `WSAM`            | the update: sharpness with a weight of its own                       | 2      |

Arguments that are not listed are those of `SharpnessAware`: every method takes masks, schedules, checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsesam.ascent import Masks, Step, StepKind
from sparsesam.checkpoint import OwnState
from sparsesam.distributed.shards import Shards, local_part
from sparsesam.masks.kept_entries import kept_entries, put_entries
from sparsesam.masks.mask import MaskRule
from sparsesam.perturbation import Target, entries_of
from sparsesam.sam import SharpnessAware
from sparsesam.schedules import RhoSchedule
from sparsesam.wrapper import PerturbedParam, PerturbedParams

# ---- one pass ------------------------------------------------------------------------------------------------

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
    are back at w after every step, which is not so in the authors' code.

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
    """Implements sharpness-awareness in one pass: the perturbation is k times the last update of the base optimizer.

        e = k * m ⊙ (w - w_before)
        w <- base's update of w with the gradient at w + e

    There is no norm and no rho, and the base optimizer's state is not used: e shrinks with the learning rate. The first
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
        steps_ahead: k, in the parameter groups as ``steps_ahead``, where it may differ by group and be changed. For
            networks with batch normalization 40 to 110 if labels are noisy, 2 to 40 if they are clean; 5 to 20 for
            other networks, which do not train with much more; about 1 is Nesterov's look-ahead.
        mask: as in `SSAM`; only the updates of perturbed weights are kept.
        schedule: a function of the step that returns a factor on ``steps_ahead``.
        every: as in `SAM`.
        start: as in `SAM`.

    Examples:
        >>> opt = sparsesam.ExtrapolatedSAM(base, model, steps_ahead=20)
        >>> loss = opt.minimize(lambda: loss_fn(model(x), y))  # calls the function once
    """

    strength = "steps_ahead"
    #: w_before - w. While the weights are perturbed, the same memory holds w.
    saved_tensors = {"back": "kept"}  # noqa: RUF012

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
        options: dict[str, Any] = {"rho_schedule": schedule, "every": every, "start": start}
        super().__init__(base, model, steps_ahead, mask=mask, norm="masked", **options)
        if self.own.masks.needs_gradient:  # which is the momentum here
            require_momentum(base)

    @property
    def last_update_norm(self) -> float | None:
        """||w - w_before|| of the perturbed weights; None if no update is recorded."""
        back = self.own.tensors["back"].values()
        return float(torch.stack([part.norm() for part in back]).norm()) if back else None

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
            step.weights.update(zip([target.name for target in targets], buffers, strict=True))
            self._perturbation.move_to(targets, ahead, saved=buffers)
        self.own.counters.skipped_ascents += not groups and any(target.rho for target in self._tracked(step))

    def update(self) -> None:
        step, back = self._step, self.own.tensors["back"]
        assert step is not None, "an update ends a step"
        # The difference is needed only if the next step is perturbed.
        tracked = self._tracked(step) if self._kind_of(self.steps + 1) is StepKind.ASCEND else []
        for target, weight in zip(tracked, entries_of(tracked), strict=True):
            if target.name not in step.weights:
                old = back.pop(target.name, None)
                fits = old is not None and old.shape == weight.shape and old.dtype == weight.dtype
                step.weights[target.name] = old.copy_(weight) if old is not None and fits else weight.clone()
        super().update()
        buffers = [step.weights[target.name] for target in tracked]
        if buffers:
            torch._foreach_sub_(buffers, entries_of(tracked))
        self.own.tensors["back"] = dict(zip([target.name for target in tracked], buffers, strict=True))

    def _tracked(self, step: Step) -> list[Target]:
        targets = (self.target(step, p, p.parameter) for p in step.params)
        return [target for target in targets if target.mask is None or not target.mask.is_empty]

    def mask_changes(self, params: PerturbedParams, old: Masks, new: Masks) -> None:
        """Keep the updates of entries in both masks; those of entries only in the new mask are zero."""
        back = self.own.tensors["back"]
        for p in params:
            if p.name in back:
                dense = put_entries(torch.zeros_like(local_part(p.parameter)), old[p.name], back[p.name])
                back[p.name] = kept_entries(dense, new[p.name]).clone()


# ---- two passes, another gradient for the update -------------------------------------------------------------


class TwoGradients(SharpnessAware):
    """Base class of methods that combine the gradients g at w and s at w + e; nothing is left out of the first."""

    needs_every_gradient = True

    def dot(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
        """Returns the scalar product over all parameters with a gradient, on all ranks if they are sharded."""
        dtype = torch.promote_types(left[0].dtype, torch.float32)  # float16 ends at 65504
        pairs = zip(left, right, strict=True)
        parts = [torch.vdot(a.flatten().to(dtype), b.flatten().to(dtype)) for a, b in pairs]
        named = {self._names[p]: p for group in self.param_groups for p in group["params"] if p.grad is not None}
        shards = Shards.of(named)
        if shards is not None:
            parts = [part for name, part in zip(named, parts, strict=True) if shards.parts[name].counts]
        total = torch.stack([part.to(left[0].device) for part in parts] or [left[0].new_zeros(())]).sum()
        return total if shards is None else shards.sum(total)


class GSAM(TwoGradients):
    """Implements GSAM (Zhuang et al. 2022): also lowers the surrogate gap f(w + e) - f(w).

        s - alpha * g_orthogonal,    g_orthogonal = g - (g·s / ||s||²) s

    g is the gradient at w, s that at w + e. In the paper rho falls with the learning rate: give a ``rho_schedule`` of
    the same shape, such as `Cosine`. alpha = 0 is SAM, and so is a step in which ||s||² overflows float32.

    Args:
        alpha: the weight of the part of g that is orthogonal to s; the paper tries 0.05 to 0.7.

    Examples:
        >>> opt = sparsesam.GSAM(base, model, rho=0.1, alpha=0.4)
        >>> loss = opt.minimize(lambda: loss_fn(model(x), y))
    """

    def __init__(
        self, base: Optimizer, model: nn.Module, rho: float = 0.05, *, alpha: float = 0.4, **options: Any
    ) -> None:
        if not isinstance(alpha, int | float) or not 0 <= alpha < math.inf:
            raise ValueError(f"alpha must be a finite number of at least 0, got {alpha}; 0 is SAM, 0.4 is usual")
        self.alpha = alpha
        super().__init__(base, model, rho, **options)

    def combine(self, first: list[Tensor] | None, second: list[Tensor]) -> None:
        if first is None or not second or self.alpha == 0:
            return
        squares = self.dot(second, second)
        share = torch.where(squares > 0, self.dot(first, second) / squares, 0.0)
        alpha = torch.where(share.isfinite(), self.alpha, 0.0)
        # s - alpha (g - share s) = (1 + alpha share) s - alpha g
        torch._foreach_mul_(second, 1 + alpha * share.nan_to_num(0.0, 0.0, 0.0))
        torch._foreach_mul_(first, alpha)
        torch._foreach_sub_(second, first)


class WSAM(TwoGradients):
    """Implements WSAM (Yue et al. 2023): sharpness as a regularization term with a weight of its own.

        f(w) + gamma / (1 - gamma) * (f(w + e) - f(w))

    With ``decouple`` the base optimizer sees only the gradient g at w, and w moves by -lr * gamma / (1 - gamma) *
    (s - g) after its update, with s the gradient at w + e: the sharpness term enters neither momentum nor the base's
    scaling. A GradScaler scales the gradients and not this term: use ``decouple=False`` with one. gamma = 0.5 without
    ``decouple`` is SAM, gamma = 0 the base optimizer.

    Args:
        gamma: the weight, in [0, 1).
        decouple: whether the sharpness term is applied apart from the base optimizer.

    Examples:
        >>> opt = sparsesam.WSAM(base, model, rho=0.05, gamma=0.9)
        >>> loss = opt.minimize(lambda: loss_fn(model(x), y))
    """

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        rho: float = 0.05,
        *,
        gamma: float = 0.9,
        decouple: bool = True,
        **options: Any,
    ) -> None:
        if not isinstance(gamma, int | float) or not 0 <= gamma < 1:
            raise ValueError(f"gamma must be in [0, 1), got {gamma}; 0.5 weighs the loss at w + e alone, 0.9 is usual")
        self.gamma, self.decouple = gamma, decouple
        super().__init__(base, model, rho, **options)

    def _start(self, own: OwnState) -> None:
        super()._start(own)
        self._sharpness: dict[Tensor, Tensor] = {}

    def step(self, closure: Any = None, **options: Any) -> Any:
        if self.decouple and options.get("scaler") is not None:
            raise ValueError(
                "scaler must not be given with decouple=True: the sharpness term would stay scaled; use decouple=False"
            )
        return super().step(closure, **options)

    def combine(self, first: list[Tensor] | None, second: list[Tensor]) -> None:
        self._sharpness = {}  # of a step that was not taken
        if first is None or not second:
            return
        weight = self.gamma / (1 - self.gamma)
        sharpness = torch._foreach_sub(second, first)
        torch._foreach_copy_(second, first)
        if self.decouple:
            params = (p for group in self.param_groups for p in group["params"] if p.grad is not None)
            self._sharpness = dict(zip(params, torch._foreach_mul(sharpness, weight), strict=True))
        else:
            torch._foreach_add_(second, sharpness, alpha=weight)

    def after_update(self) -> None:
        sharpness, self._sharpness = self._sharpness, {}
        for group in self.param_groups:
            rate = float(group["lr"]) * (-1 if group.get("maximize") else 1)
            for p in group["params"]:
                if p.grad is not None and p in sharpness:
                    local_part(p).sub_(sharpness[p].to(p.dtype), alpha=rate)
