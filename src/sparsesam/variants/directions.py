"""Methods of two passes with another direction of the ascent."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsesam.ascent import Masks, Step
from sparsesam.checkpoint import OwnState
from sparsesam.distributed.shards import is_sharded, local_part
from sparsesam.masks.kept_entries import kept_entries, put_entries
from sparsesam.masks.packed import PackedMask
from sparsesam.perturbation import Norm, is_usable
from sparsesam.sam import SharpnessAware
from sparsesam.utils.checks import is_finite, is_within
from sparsesam.wrapper import PerturbedParam, PerturbedParams


class FriendlySAM(SharpnessAware):
    """Implements Friendly-SAM (Li et al. 2024): ascends along what is particular to the batch.

        e = rho * d / ||d||,    d = g - sigma * a
        a <- decay * a + (1 - decay) * g

    a is a moving average of the gradients g at w, an estimate of the gradient of the whole data set. It starts as the
    first g, and the first step is SAM's. As in the authors' code and in pytorch-optimizer, d has the average before the
    step; the paper's has the one that includes g, which for sigma = 1 is the same direction. rho is SAM's, usually 0.05
    to 0.2. sigma = 0 is SAM. It needs another 4 bytes per parameter, with ``norm="masked"`` per perturbed weight.

    It does not go with a GradScaler, whose scale would enter the average, with several ascent steps, with
    ``ascent_scope="local"``, or with implicit ascents.

    Args:
        sigma: how much of the average is subtracted.
        decay: lambda in the paper; 0.9 is usual.

    Examples:
        >>> opt = sparsesam.FriendlySAM(base, model, rho=0.1, sigma=1.0, decay=0.9)
        >>> loss = opt.minimize(lambda: loss_fn(model(x), y))
    """

    saved_tensors = {"average": "normed"}  # noqa: RUF012
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
        if not is_finite(sigma, 0):
            raise ValueError(f"sigma must be a finite number of at least 0, got {sigma}; 0 is SAM, 1 is usual")
        if not is_within(decay, 0, 1):
            raise ValueError(f"decay must be in [0, 1], got {decay}; 0.9 is usual")
        self.sigma, self.decay = sigma, decay
        super().__init__(base, model, rho, **options)

    def direction(self, params: PerturbedParams) -> dict[str, Tensor]:
        masks, average = self._average_masks(params), self.own.tensors["average"]
        found = self._gradients(params)
        for name in found.keys() & average.keys():
            entries = kept_entries(found[name], masks[name])
            entries = entries.sub(average[name].to(entries), alpha=self.sigma)
            is_whole = entries.shape == found[name].shape
            found[name] = entries if is_whole else put_entries(found[name].clone(), masks[name], entries)
        return found

    def ascend(self, step: Step) -> None:
        super().ascend(step)
        if step.ascent_failed:
            return
        masks, average, norm = self._average_masks(step.params), self.own.tensors["average"], self._last_norm
        is_first = not average
        for name, gradient in self._gradients(step.params).items():
            entries = kept_entries(gradient, masks[name])
            if is_first:
                average[name] = entries.clone()
                continue
            # The model's dtype may have changed since.
            own = average[name] = average[name].to(entries) if name in average else torch.zeros_like(entries)
            if isinstance(norm, Tensor):  # on a device, where a gradient that is not finite is not known here
                entries = torch.where(is_usable(norm).to(own.device), entries, own)
            own.lerp_(entries, 1 - self.decay)

    def _gradients(self, params: PerturbedParams) -> dict[str, Tensor]:
        """Returns this rank's parts of the gradients, as dense tensors."""
        return self._local(super().direction(params), params)

    def _average_masks(self, params: PerturbedParams) -> Masks:
        whole = "average" in self.own.whole
        return {name: None if whole else mask for name, mask in self._masks_of(params).items()}


class ZSharp(SharpnessAware):
    """Implements ZSharp (Yun 2025): in each tensor, ascends along the entries of g that stand out.

        d = g where |z| is at least its quantile, otherwise 0,    z = (g - mean(g)) / std(g)
        e = rho * m ⊙ d / ||d||

    Mean, deviation and quantile are those of a whole parameter tensor in this step, whatever the mask m keeps; within a
    tensor the deviation changes no order, and is not computed. rho is SAM's. quantile = 0 is SAM. The mask of a step is
    not kept: no selection is stored and `sparsity` is that of the mask. Every gradient is computed, so nothing is left
    out of the first backward; with sharded parameters, gradients are gathered tensor by tensor. It does not go with
    implicit ascents.

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
        if not is_within(quantile, 0, 1):
            raise ValueError(f"quantile must be in [0, 1], got {quantile}; 0 is SAM, 0.95 is usual")
        self.quantile = quantile
        super().__init__(base, model, rho, **options)

    def direction(self, params: PerturbedParams) -> dict[str, Tensor]:
        found = super().direction(params)
        return {name: outstanding(gradient, self.quantile) for name, gradient in found.items()}


def outstanding(gradient: Tensor, quantile: float) -> Tensor:
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
    SAM's. beta = 1 is SAM.

    ESAM's second part, its selection of the samples whose loss rises most, is left out: the second pass sees the whole
    batch. To leave samples out of the first pass, use ``ascent_fraction``. It does not go with implicit
    ascents.

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

    def _start(self, own: OwnState) -> None:
        super()._start(own)
        self._empty: dict[str, PackedMask] = {}  # the masks of tensors that are not drawn: the same object in each step

    def signed_rho(self, param: PerturbedParam) -> float | Tensor:
        return super().signed_rho(param) / self.beta

    def _masks_of(self, params: PerturbedParams) -> Masks:
        masks = super()._masks_of(params)
        draws = np.random.default_rng((self.seed, self.steps)).random(len(masks)).tolist()
        for p, draw in zip(params, draws, strict=True):
            if draw >= self.beta:
                shape = local_part(p.parameter).shape
                masks[p.name] = self._empty.setdefault(p.name, PackedMask(shape, 0, None))
        return masks
