"""Methods of two passes that combine the gradients g at w and s at w + e."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsesam.checkpoint import OwnState
from sparsesam.distributed.shards import Shards, local_part
from sparsesam.perturbation import is_usable
from sparsesam.sam import SharpnessAware
from sparsesam.utils.checks import is_finite

_HALF = (torch.float16, torch.bfloat16)


class TwoGradients(SharpnessAware):
    """Base class of methods that combine the gradients g at w and s at w + e; nothing is left out of the first."""

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

    g is the gradient at w, s that at w + e. rho is SAM's; in the paper it falls with the learning rate:
    ``rho_schedule=FollowLearningRate(base, max_lr=…)``. alpha = 0 is SAM. pytorch-optimizer's computes the same; with
    several ranks it splits each rank's own gradient, where this one splits the gradient that all ranks use.

    Every gradient at w is needed, so a mask leaves nothing out of the first backward, and ``ascent_fraction``,
    ``ascent_scope="local"`` and implicit ascents raise an error.

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
        if not is_finite(alpha, 0):
            raise ValueError(f"alpha must be a finite number of at least 0, got {alpha}; 0 is SAM, 0.4 is usual")
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
    scaling. gamma = 0.5 without ``decouple`` is SAM, gamma = 0 the base optimizer. pytorch-optimizer's computes the
    same in one process. rho is SAM's.

    A GradScaler would scale the decoupled term, which the base optimizer does not see: it needs ``decouple=False``.
    What clips the gradient sees g alone, too. Every gradient at w is needed, as in `GSAM`, which lists what is refused.

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
        if decouple and any("lr" not in group for group in base.param_groups):
            raise ValueError(f"base must have an lr in its groups with decouple=True, got {type(base).__name__}")

    def _start(self, own: OwnState) -> None:
        super()._start(own)
        self.allows_scaler = not self.decouple

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
    slowly. k = ``every``; 1 is SAM, alpha = 0 is SAM in every k-th step. rho is SAM's. It needs another 4 bytes per
    parameter.

    As in the paper, v is projected and scaled over all parameters together; pytorch-optimizer's does so in each tensor,
    and calls the closure twice in every step. In the manner of the paper's Look-LayerSAM, ``radius="layer",
    adaptive="layer"`` has e = rho * ||w|| * g / ||g|| in each weight tensor, and rho * g / ||g|| in each bias. Every
    gradient at w is needed, as in `GSAM`, which lists what is refused.

    Args:
        every: k, the steps from one step of SAM to the next; 5 or 10 are usual.
        alpha: the weight of v between them; 0.7 is usual.

    Examples:
        >>> opt = sparsesam.LookSAM(base, model, rho=0.05, every=5, alpha=0.7)
        >>> loss = opt.minimize(lambda: loss_fn(model(x), y))
    """

    saved_tensors = {"orthogonal": "whole"}  # noqa: RUF012

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
        if not is_finite(alpha, 0):
            raise ValueError(f"alpha must be a finite number of at least 0, got {alpha}; 0.7 is usual")
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
