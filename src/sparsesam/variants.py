"""Other methods of the family, each a small subclass: another direction, another gradient for the update.

| class             | what it changes                                                        | passes        |
|-------------------|------------------------------------------------------------------------|---------------|
| `MomentumSAM`     | the direction: against the base optimizer's momentum                   | 1             |
| `ExtrapolatedSAM` | the direction and its length: the base optimizer's last update         | 1             |
| `FriendlySAM`     | the direction: the gradient less its moving average                    | 2             |
| `ZSharp`          | the direction: in each tensor, only entries with a large z-score       | 2             |
| `ESAM`            | the tensors that are perturbed: drawn anew in each step                | 2             |
| `GSAM`            | the update: less of the gradient at w that is orthogonal to SAM's      | 2             |
| `WSAM`            | the update: sharpness with a weight of its own                         | 2             |
| `LookSAM`         | the update: between SAM's steps, a part of the last SAM gradient again | 2, 1 between  |

Arguments that are not listed are those of `SharpnessAware`: every method takes masks, schedules, checkpoints. What each
costs, and which options do not go together (they raise an error), is in docs/methods.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsesam.ascent import Masks, Step
from sparsesam.distributed.shards import Shards, is_sharded, local_part
from sparsesam.masks.mask import MaskRule
from sparsesam.masks.packed import PackedMask
from sparsesam.perturbation import Norm, Target, is_unmoved, is_usable
from sparsesam.sam import SharpnessAware
from sparsesam.schedules import RhoSchedule
from sparsesam.utils.checks import check_number, is_within
from sparsesam.wrapper import PerturbedParam, PerturbedParams

_HALF = (torch.float16, torch.bfloat16)
#: State keys of the momentum in torch's optimizers: SGD, RMSprop, Muon; Adam and its variants.
_MOMENTUM = ("momentum_buffer", "exp_avg")
_REMEDY = (
    "give the base a momentum (SGD, RMSprop and Muon: momentum=0.9; Adam and its variants have one), or use "
    "ExtrapolatedSAM, which works with every base, without a mask made from gradients"
)

# ---- one pass: along the base optimizer's momentum, or its last update ---------------------------------------


class OnePass(SharpnessAware):
    """Base class of methods that need no gradient at w; masks made from gradients use the momentum instead."""

    def passes(self) -> int:
        return 1

    def direction(self, params: PerturbedParams) -> dict[str, Tensor]:
        """Returns the base optimizer's momentum; nothing before its first step."""
        states = {p.name: self.base.state.get(p.parameter, {}) for p in params}
        found = {name: [s[key] for key in _MOMENTUM if s.get(key) is not None] for name, s in states.items()}
        kept = sorted({str(key) for state in states.values() for key in state})
        if kept and not set(kept) & set(_MOMENTUM):
            raise ValueError(
                f"base must have a momentum, but {type(self.base).__name__} keeps only {', '.join(kept)} for its "
                f"parameters; {_REMEDY}"
            )
        return {name: momenta[0] for name, momenta in found.items() if momenta}


def _require_momentum(base: Optimizer) -> None:
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
        _require_momentum(base)

    def signed_rho(self, param: PerturbedParam) -> float | Tensor:
        return -param.rho  # also with maximize: the momentum consists of reversed gradients


class ExtrapolatedSAM(OnePass):
    """Implements sharpness-awareness in one pass: the perturbation is a multiple of the base optimizer's last update.

        e = k * m ⊙ (w - w_before),    k = 200 rho
        w <- base's update of w with the gradient at w + e

    There is no norm, and the base optimizer's state is not used: e shrinks with the learning rate. The factor 200 makes
    the best rho that of SAM, within a factor of two on ten of thirteen tasks (docs/study.md). The first
    step, and a step after one that a GradScaler skipped, is a plain step of the base. The returned loss and the running
    statistics are those at w + e, which becomes w as the learning rate decays. docs/one-pass.md has related work. It
    takes no other options than these:

    Args:
        rho: the strength. Networks without batch normalization do not train with much more than 0.1; 0.005 looks one
            update ahead, as Nesterov's method does.
        mask: as in `SSAM`; only the updates of tensors with perturbed weights are kept.
        rho_schedule: as in `SAM`.
        every: as in `SAM`.
        start: as in `SAM`.

    Examples:
        >>> opt = sparsesam.ExtrapolatedSAM(base, model, rho=0.05)
        >>> loss = opt.minimize(lambda: loss_fn(model(x), y))  # calls the function once
    """

    #: Updates to look ahead for a rho of 1.
    updates_per_rho = 200
    #: w_before - w, from one update to the next ascent.
    saved_tensors = ("back",)

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
            _require_momentum(base)

    @property
    def last_update_norm(self) -> float | None:
        """||w - w_before|| of the tensors with perturbed weights; None if no update is recorded."""
        back = self.own.tensors["back"].values()
        return float(torch.stack([part.norm() for part in back]).norm()) if back else None

    def signed_rho(self, param: PerturbedParam) -> float | Tensor:
        return -self.updates_per_rho * param.rho

    def ascend(self, step: Step) -> None:
        back = self.own.tensors["back"]
        wanted = [target for target in self._tracked(step) if not target.is_unmoved]
        found = [
            replace(target, direction=back.pop(target.name).to(target.weight), eta=None)
            for target in wanted
            if target.name in back
        ]
        self._perturbation.move(found, 1.0)
        self.own.counters.skipped_ascents += bool(wanted) and not found

    def update(self) -> None:
        assert self._step is not None, "an update ends a step"
        # The difference is needed only if the next step is perturbed.
        tracked = self._tracked(self._step) if self._ascends(self.steps + 1) else []
        weights = [target.weight for target in tracked]
        back = [torch.empty_like(weight) for weight in weights]
        if tracked:
            torch._foreach_copy_(back, weights)
        super().update()
        if tracked:
            torch._foreach_sub_(back, weights)
        self.own.tensors["back"] = dict(zip([target.name for target in tracked], back, strict=True))

    def _tracked(self, step: Step) -> list[Target]:
        """Returns the tensors of which a weight is perturbed, on any rank: it may be another after the next refresh."""
        kept = self.own.masks.kept
        return [self.target(step, p, p.parameter) for p in step.params if kept.get(p.name) != 0]


# ---- two passes, another direction ---------------------------------------------------------------------------


class FriendlySAM(SharpnessAware):
    """Implements Friendly-SAM (Li et al. 2024): ascends along what is particular to the batch.

        e = rho * d / ||d||,    d = g - sigma * a
        a <- decay * a + (1 - decay) * g

    a is a moving average of the gradients g at w, an estimate of the gradient of the whole data set. It starts as the
    first g, and the first step is SAM's. As in the authors' code and in pytorch-optimizer, d has the average before the
    step; the paper's has the one that includes g, which for sigma = 1 is the same direction. rho is SAM's. sigma = 0 is
    SAM.

    Args:
        sigma: how much of the average is subtracted.
        decay: lambda in the paper; 0.9 is usual.

    Examples:
        >>> opt = sparsesam.FriendlySAM(base, model, rho=0.1, sigma=1.0, decay=0.9)
        >>> loss = opt.minimize(lambda: loss_fn(model(x), y))
    """

    saved_tensors = ("average",)
    refused = {  # noqa: RUF012
        "ascent": "the average is one of plain gradients",
        "ascent_steps": "the average is one of gradients at w",
        "ascent_scope": "each rank would have its own average, and a checkpoint only one of them",
    }
    allows_scaler = False

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        rho: float = 0.05,
        *,
        sigma: float = 1.0,
        decay: float = 0.9,
        **options: Any,
    ) -> None:
        check_number("sigma", sigma, "0 is SAM, 1 is usual")
        check_number("decay", decay, "0.9 is usual", most=1)
        self.sigma, self.decay = sigma, decay
        super().__init__(base, model, rho, **options)

    def direction(self, params: PerturbedParams) -> dict[str, Tensor]:
        average, found = self.own.tensors["average"], self._gradients(params)
        return {
            name: gradient.sub(average[name].to(gradient), alpha=self.sigma) if name in average else gradient
            for name, gradient in found.items()
        }

    def ascend(self, step: Step) -> None:
        super().ascend(step)
        if step.ascent_failed:
            return
        average, norm, found = self.own.tensors["average"], self._last_norm, self._gradients(step.params)
        is_first = not average
        for p in step.params:
            mask, gradient = step.masks[p.name], found.get(p.name)
            if self.options.norm == "masked":  # gradients of what is not moved count as zero: they may not be computed
                if is_unmoved(mask, p.rho):
                    gradient = torch.zeros_like(local_part(p.parameter))
                elif mask is not None and gradient is not None:
                    gradient = gradient.masked_fill(~mask.unpack(gradient.device), 0.0)
            if gradient is None:
                continue
            # The model's dtype may have changed since.
            own = average[p.name].to(gradient) if p.name in average else torch.zeros_like(gradient)
            if isinstance(norm, Tensor):  # on a device, where a gradient that is not finite is not known here
                gradient = torch.where(is_usable(norm).to(own.device), gradient, own)
            average[p.name] = gradient.clone() if is_first else own.lerp_(gradient, 1 - self.decay)

    def _gradients(self, params: PerturbedParams) -> dict[str, Tensor]:
        """Returns this rank's parts of the gradients, as dense tensors."""
        return self._local(super().direction(params), params)


class ZSharp(SharpnessAware):
    """Implements ZSharp (Yun 2025): in each tensor, ascends along the entries of g that stand out.

        d = g where |z| is at least its quantile, otherwise 0,    z = (g - mean(g)) / std(g)
        e = rho * m ⊙ d / ||d||

    Mean, deviation and quantile are those of a whole parameter tensor in this step, whatever the mask m keeps; within a
    tensor the deviation changes no order, and is not computed. rho is SAM's. quantile = 0 is SAM. `sparsity` is that of
    the mask. Every gradient is computed, so nothing is left out of the first backward; with sharded parameters,
    gradients are gathered tensor by tensor.

    Args:
        quantile: the share of entries of each tensor that is not perturbed; the paper's percentile is 0.95.

    Examples:
        >>> opt = sparsesam.ZSharp(base, model, rho=0.05, quantile=0.95)
        >>> loss = opt.minimize(lambda: loss_fn(model(x), y))
    """

    needs_every_gradient = True
    refused = {"ascent": "z-scores are those of plain gradients"}  # noqa: RUF012

    def __init__(
        self, base: Optimizer, model: nn.Module, rho: float = 0.05, *, quantile: float = 0.95, **options: Any
    ) -> None:
        check_number("quantile", quantile, "0 is SAM, 0.95 is usual", most=1)
        self.quantile = quantile
        super().__init__(base, model, rho, **options)

    def direction(self, params: PerturbedParams) -> dict[str, Tensor]:
        return {name: _outstanding(g, self.quantile) for name, g in super().direction(params).items()}


def _outstanding(gradient: Tensor, quantile: float) -> Tensor:
    """Returns the gradient, or this rank's part of it, with zeros where |z| is below its quantile."""
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    sharded: Any = gradient
    whole: Tensor = sharded.full_tensor() if is_sharded(gradient) else gradient
    part = local_part(gradient)
    if whole.numel() == 0:
        return part
    mean = whole.mean(dtype=torch.promote_types(whole.dtype, torch.float32))
    rank = math.ceil(quantile * (whole.numel() - 1)) + 1
    least = (whole - mean).abs_().flatten().kthvalue(rank).values
    return part * ((part - mean).abs_() >= least)  # a product, so that NaN and inf stay


class ESAM(SharpnessAware):
    """Implements the weight perturbation of ESAM (Du et al. 2022): each tensor is perturbed with probability beta.

        e = rho / beta * d ⊙ g / ||d ⊙ g||

    d is 1 in the drawn tensors and 0 in the others; it is drawn anew in each step, from ``seed`` and the number of the
    step, so that resumed runs and all ranks draw the same. What is not drawn has no gradient in the first backward and
    takes no part in the norm, as in the authors' code; with ``norm="full"``, it is ||g|| and nothing is left out. With
    a mask, the drawn tensors are perturbed where it is 1; `masks` and `sparsity` are those of the mask alone. rho is
    SAM's. beta = 1 is SAM. ESAM's second part, its selection of the samples whose loss rises most, is left out: the
    second pass sees the whole batch.

    Args:
        beta: the probability of a tensor to be perturbed, in (0, 1].
        seed: the seed of the draws.

    Examples:
        >>> opt = sparsesam.ESAM(base, model, rho=0.05, beta=0.5)
        >>> loss = opt.minimize(lambda: loss_fn(model(x), y))
    """

    refused = {"ascent": "the masked weights would be other ones in each step"}  # noqa: RUF012

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        rho: float = 0.05,
        *,
        beta: float = 0.5,
        seed: int = 0,
        norm: Norm = "masked",
        **options: Any,
    ) -> None:
        if not is_within(beta, 0, 1) or beta == 0:
            raise ValueError(f"beta must be in (0, 1], got {beta}; 1 is SAM, 0.5 is usual")
        self.beta, self.seed = beta, seed
        super().__init__(base, model, rho, norm=norm, **options)

    def signed_rho(self, param: PerturbedParam) -> float | Tensor:
        return super().signed_rho(param) / self.beta

    def _masks_of(self, params: PerturbedParams) -> Masks:
        masks = super()._masks_of(params)
        draws = np.random.default_rng((self.seed, self.steps)).random(len(masks)).tolist()
        for p, draw in zip(params, draws, strict=True):
            if draw >= self.beta:
                masks[p.name] = _empty_mask(local_part(p.parameter).shape)
        return masks


@functools.cache
def _empty_mask(shape: torch.Size) -> PackedMask:
    """The same object in each step, so that masks that did not change are equal."""
    return PackedMask(shape, 0, None)


# ---- two passes, combined: the gradients g at w and s at w + e -----------------------------------------------


class TwoGradients(SharpnessAware):
    """Base class of methods that combine the gradients g at w and s at w + e; a mask leaves out none of the first."""

    needs_every_gradient = True
    refused = {  # noqa: RUF012
        "ascent": "the gradient at w is part of the update",
        "ascent_fraction": "the gradient at w is part of the update",
        "ascent_scope": "the gradient at w is part of the update, which must be the same on all ranks",
    }

    def dot(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
        """Returns the scalar product over all parameters with a gradient, on all ranks if they are sharded."""
        pairs = [(a.flatten(), b.flatten()) for a, b in zip(left, right, strict=True)]
        parts = [torch.vdot(a.float(), b.float()) if a.dtype in _HALF else torch.vdot(a, b) for a, b in pairs]
        named = {self._names[p]: p for group in self.param_groups for p in group["params"] if p.grad is not None}
        shards = Shards.of(named)
        if shards is not None:
            parts = [part for name, part in zip(named, parts, strict=True) if shards.parts[name].counts]
        total = torch.stack([part.to(left[0].device) for part in parts] or [left[0].new_zeros(())]).sum()
        return total if shards is None else shards.sum(total)

    def share(self, of: Sequence[Tensor], along: Sequence[Tensor]) -> Tensor:
        """Returns of·along / ||along||², 0 for a vector of zeros: the part of one vector that is along the other."""
        squares = self.dot(along, along)
        return torch.where(squares > 0, self.dot(of, along) / squares, 0.0)


class GSAM(TwoGradients):
    """Implements GSAM (Zhuang et al. 2022): also lowers the surrogate gap f(w + e) - f(w).

        s - alpha * g_orthogonal,    g_orthogonal = g - (g·s / ||s||²) s

    g is the gradient at w, s that at w + e, both averaged over all ranks. rho is SAM's; in the paper it falls with the
    learning rate: ``rho_schedule=FollowLearningRate(base, max_lr=…)``. alpha = 0 is SAM.

    Args:
        alpha: the weight of the part of g that is orthogonal to s; 0.4 is usual.

    Examples:
        >>> schedule = sparsesam.FollowLearningRate(base, max_lr=0.1)
        >>> opt = sparsesam.GSAM(base, model, rho=0.1, alpha=0.4, rho_schedule=schedule)
        >>> loss = opt.minimize(lambda: loss_fn(model(x), y))
    """

    def __init__(
        self, base: Optimizer, model: nn.Module, rho: float = 0.05, *, alpha: float = 0.4, **options: Any
    ) -> None:
        check_number("alpha", alpha, "0 is SAM, 0.4 is usual")
        self.alpha = alpha
        super().__init__(base, model, rho, **options)

    def combine(self, names: list[str], first: list[Tensor] | None, second: list[Tensor]) -> None:
        if first is None or not second or self.alpha == 0:
            return
        share = self.share(first, second)
        # Where ||s||² overflows: SAM's step.
        alpha = torch.where(share.isfinite(), torch.full_like(share, self.alpha), torch.zeros_like(share))
        # s - alpha (g - share s) = (1 + alpha share) s - alpha g
        torch._foreach_mul_(second, 1 + alpha * share.nan_to_num(0.0, 0.0, 0.0))
        torch._foreach_mul_(first, alpha)
        torch._foreach_sub_(second, first)


class WSAM(TwoGradients):
    """Implements WSAM (Yue et al. 2023): sharpness as a regularization term with a weight of its own.

        f(w) + gamma / (1 - gamma) * (f(w + e) - f(w))

    With ``decouple`` the base optimizer sees only the gradient g at w, and w moves by -lr * gamma / (1 - gamma) *
    (s - g) after its update, with s the gradient at w + e: the sharpness term enters neither momentum nor the base's
    scaling. gamma = 0.5 without ``decouple`` is SAM, gamma = 0 the base optimizer. rho is SAM's.

    What clips the gradient, or scales it, sees g alone with ``decouple``: a GradScaler needs ``decouple=False``.

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
        self.gamma, self.decouple, self.allows_scaler = gamma, decouple, not decouple
        super().__init__(base, model, rho, **options)
        if decouple and any("lr" not in group for group in base.param_groups):
            raise ValueError(f"base must have an lr in its groups with decouple=True, got {type(base).__name__}")

    def combine(self, names: list[str], first: list[Tensor] | None, second: list[Tensor]) -> None:
        if first is None or not second:
            return
        weight = self.gamma / (1 - self.gamma)
        sharpness = torch._foreach_sub(second, first)
        torch._foreach_copy_(second, first)
        if self.decouple:
            torch._foreach_mul_(sharpness, weight)
            assert self._step is not None, "gradients are combined within a step"
            self._step.kept = dict(zip(names, sharpness, strict=True))
        else:
            torch._foreach_add_(second, sharpness, alpha=weight)

    def after_update(self) -> None:
        assert self._step is not None, "an update ends a step"
        for group in self.param_groups:
            for p in group["params"]:
                term = self._step.kept.pop(self._names[p], None)
                if term is not None:
                    rate = float(group["lr"]) * (-1 if group.get("maximize") else 1)
                    local_part(p).sub_(term.to(p.dtype), alpha=rate)


class LookSAM(TwoGradients):
    """Implements LookSAM (Liu et al. 2022): SAM in every k-th step, and one pass in between, with the gradient

        g + alpha * ||g|| / ||v|| * v,    v = s - (s·g / ||g||²) g

    v is the part of SAM's gradient s that is orthogonal to the gradient g at w in the last step of SAM; it changes
    slowly. k = ``every``; 1 is SAM, alpha = 0 is SAM in every k-th step. rho is SAM's.

    As in the paper, v is projected and scaled over all parameters together. In the manner of the paper's Look-LayerSAM,
    ``radius="layer", adaptive="layer"`` has e = rho * ||w|| * g / ||g|| in each weight tensor, and rho * g / ||g|| in
    each bias.

    Args:
        every: k, the steps from one step of SAM to the next; 5 or 10 are usual.
        alpha: the weight of v between them; 0.7 is usual.

    Examples:
        >>> opt = sparsesam.LookSAM(base, model, rho=0.05, every=5, alpha=0.7)
        >>> loss = opt.minimize(lambda: loss_fn(model(x), y))
    """

    saved_tensors = ("orthogonal",)

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        rho: float = 0.05,
        *,
        every: int = 5,
        alpha: float = 0.7,
        **options: Any,
    ) -> None:
        check_number("alpha", alpha, "0.7 is usual")
        self.alpha = alpha
        super().__init__(base, model, rho, every=every, **options)

    def combine(self, names: list[str], first: list[Tensor] | None, second: list[Tensor]) -> None:
        kept = self.own.tensors["orthogonal"]
        if self.options.every == 1 or not second:
            return
        if self._ascends(self.steps):
            kept.clear()  # also if nothing moved in this step
            if first is not None:
                torch._foreach_mul_(first, -self.share(second, first))
                torch._foreach_add_(first, second)
                kept.update((name, v.nan_to_num_(0.0, 0.0, 0.0)) for name, v in zip(names, first, strict=True))
        elif kept:
            v = [kept[name] if name in kept else torch.zeros_like(g) for name, g in zip(names, second, strict=True)]
            size = self.dot(v, v).sqrt()
            ratio = torch.where(is_usable(size), self.alpha * self.dot(second, second).sqrt() / size, 0.0)
            torch._foreach_add_(second, torch._foreach_mul(v, ratio))
