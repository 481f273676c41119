"""Builds the optimizer of a config, with its mask and schedules."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import sparsesam
from sparsesam.lab.experiment.config import VARIANTS, TrainConfig
from sparsesam.lab.experiment.seeds import Purpose, derive_seed
from sparsesam.lab.names import accepted
from sparsesam.masks.patterns import as_pattern

#: Settings of `VARIANTS`; each has some of them.
_OWN = ("alpha", "gamma", "decouple", "sigma", "decay", "beta", "quantile")


def make_optimizer(config: TrainConfig, model: nn.Module, *, fisher_data: Any, steps_per_epoch: int) -> Optimizer:
    """Build the config's optimizer for ``model``; ``fisher_data`` is the data set for the Fisher information."""
    base = _base(config, model)
    if config.is_plain:
        return base
    if config.optimizer == "auto":
        cost = {} if config.budget is None else {"cost": config.budget}
        return sparsesam.recommended(base, model, rho=config.rho, **cost)
    has_mask = config.optimizer not in ("sam", "asam", *VARIANTS)
    mask = _mask(config, model, fisher_data, steps_per_epoch) if has_mask else None
    schedule = _rho_schedule(config, base, steps_per_epoch)
    timing: dict[str, Any] = {"every": config.ascent_every, "start": round(config.ascent_start * steps_per_epoch)}
    if config.ascent == "extrapolation":
        return sparsesam.ExtrapolatedSAM(base, model, config.rho, mask=mask, rho_schedule=schedule, **timing)
    same = ("rho", "eta", "radius", "ascent_steps", "ascent_fraction", "engine")
    common = timing | {name: getattr(config, name) for name in same}
    common |= {"adaptive": config.adaptive or config.optimizer == "asam", "rho_schedule": schedule}
    if variant := VARIANTS.get(config.optimizer):
        own = {name: value for name in _OWN if (value := getattr(config, name)) is not None}
        own["seed"] = derive_seed(config.seed, Purpose.MASK)
        return variant(base, model, **common, **accepted(variant, own))
    common |= {"mask": mask, "norm": config.norm}
    if config.ascent == "momentum":
        return sparsesam.MomentumSAM(base, model, **common)
    return (sparsesam.SAM if mask is None else sparsesam.SSAM)(base, model, ascent=config.ascent, **common)


def lr_factor(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """Returns the factor of the config's learning rate in ``step``.

    During the W steps of warm-up linear, from ``warmup_first``, by default 1 / W, in the first to 1 in the last. Then
    final + (1 - final) (1 + cos(pi t / T)) / 2 over the T steps after it, gamma to the power of the number of
    milestones passed, or 1.
    """
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if step < warmup:
        first = 1 / warmup if config.warmup_first is None else config.warmup_first
        return first + (1 - first) * step / max(1, warmup - 1)
    if config.lr_schedule == "constant":
        return 1.0
    if config.lr_schedule == "step":
        return config.lr_gamma ** sum(step >= round(epoch * steps_per_epoch) for epoch in config.lr_milestones)
    cosine = (1 + math.cos(math.pi * (step - warmup) / max(1, config.epochs * steps_per_epoch - warmup))) / 2
    return config.lr_final + (1 - config.lr_final) * cosine


def _base(config: TrainConfig, model: nn.Module) -> Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind: Any = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.base_name]
    base: Optimizer = kind(parameters, **accepted(kind, vars(config)))  # each has some of our settings
    if (largest := config.clip_grad_norm) is not None:

        def clip(*_: Any) -> None:
            """Runs on the gradient at w + e, averaged over ranks and unscaled."""
            torch.nn.utils.clip_grad_norm_(parameters, largest)

        base.register_step_pre_hook(clip)
    return base


def _mask(config: TrainConfig, model: nn.Module, fisher_data: Any, steps_per_epoch: int) -> sparsesam.MaskRule:
    if config.optimizer == "sam-on":
        return sparsesam.fixed_mask(types=sparsesam.NORMALIZATION)
    if config.optimizer == "ssam" and config.layers is not None:
        return sparsesam.fixed_mask(*config.layers)
    refresh = config.steps_between_masks(steps_per_epoch)
    common: dict[str, Any] = {"refresh": refresh, "seed": derive_seed(config.seed, Purpose.MASK)}
    samples = config.fisher_samples
    if config.optimizer == "ssam" and config.budget is not None:
        images = torch.stack([fisher_data[place][0] for place in range(min(config.batch_size, len(fisher_data)))])
        fisher = {"data": fisher_data, "loss_fn": cross_entropy, "samples": samples}
        return sparsesam.budget_mask(model, images, config.budget, **fisher, **common)
    pattern = as_pattern(config.pattern)
    sparsity = 0.5 if config.sparsity is None and pattern.implied_sparsity is None else config.sparsity
    common |= {"sparsity": sparsity, "pattern": pattern}
    if config.optimizer == "ssam-f":
        return sparsesam.fisher_mask(fisher_data, cross_entropy, samples=samples, labels=config.fisher_labels, **common)
    if config.optimizer == "ssam-d":
        common |= {"drop": config.drop, "drop_ratio": config.drop_ratio, "growth": config.growth}
        return sparsesam.dynamic_mask(total_steps=config.epochs * steps_per_epoch, **common)
    if config.optimizer == "ssam-g":
        return sparsesam.Mask(score=sparsesam.GradientMagnitude(), **common)
    return sparsesam.random_mask(**common)


def _rho_schedule(config: TrainConfig, base: Optimizer, steps_per_epoch: int) -> sparsesam.RhoSchedule | None:
    if config.rho_schedule == "warmup":
        return sparsesam.Warmup(max(1, round(config.rho_warmup_epochs * steps_per_epoch)))
    if config.rho_schedule == "cosine":
        return sparsesam.Cosine(config.epochs * steps_per_epoch, final=config.rho_final)
    if config.rho_schedule == "learning-rate":
        return sparsesam.FollowLearningRate(base, max_lr=config.lr, final=config.rho_final)
    if config.rho_schedule == "inverse-sqrt":
        return sparsesam.InverseSqrt()
    return None
