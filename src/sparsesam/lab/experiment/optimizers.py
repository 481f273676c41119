"""From a config to an optimizer, its mask and its schedules."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import sparsesam
from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.experiment.seeds import Purpose, derive


class TimedMask(sparsesam.MaskRule):
    """Another rule, with the seconds that each of its masks took to make."""

    def __init__(self, rule: sparsesam.MaskRule) -> None:
        self.rule = rule
        self.refresh = rule.refresh
        self.seed = rule.seed
        self.seconds: list[float] = []

    @property
    def needs_gradient(self) -> bool:
        return self.rule.needs_gradient

    def make(self, moment: Any) -> dict[str, Tensor]:
        start = time.perf_counter()
        try:
            return self.rule.make(moment)
        finally:
            if any(one.is_cuda for one in moment.parameters.values()):
                torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - start)


def make_optimizer(
    config: TrainConfig, model: nn.Module, *, fisher_data: Any, steps_per_epoch: int, engine: bool
) -> Optimizer:
    """The config's optimizer for ``model``; ``fisher_data`` is what the Fisher information is measured on."""
    base = _base(config, model)
    if config.is_plain:
        return base
    if config.ascent == "extrapolation":
        return _extrapolated(config, base, model, fisher_data, steps_per_epoch)
    common: dict[str, Any] = {
        "rho": config.rho,
        "adaptive": config.adaptive or config.optimizer == "asam",
        "eta": config.eta,
        "rho_schedule": _rho_schedule(config, steps_per_epoch),
        "ascent": config.ascent,
        "every": config.ascent_every,
        "off_steps": config.ascent_off_steps,
        "start": round(config.ascent_start * steps_per_epoch),
        "ascent_fraction": config.ascent_fraction,
        "engine": engine,
    }
    if config.optimizer in ("sam", "asam"):
        if config.ascent.startswith("implicit"):
            raise ValueError(f"ascent must not be {config.ascent!r} for {config.optimizer}: it acts through a mask")
        return sparsesam.SAM(base, model, **common)
    mask = TimedMask(_mask(config, fisher_data, steps_per_epoch))
    return sparsesam.SSAM(base, model, mask=mask, norm=config.norm, **common)


def _extrapolated(
    config: TrainConfig, base: Optimizer, model: nn.Module, fisher_data: Any, steps_per_epoch: int
) -> Optimizer:
    masked = config.optimizer not in ("sam", "asam")
    return sparsesam.ExtrapolatedSAM(
        base,
        model,
        config.steps_ahead,
        mask=TimedMask(_mask(config, fisher_data, steps_per_epoch)) if masked else None,
        schedule=_rho_schedule(config, steps_per_epoch),
        every=config.ascent_every,
        start=round(config.ascent_start * steps_per_epoch),
    )


def lr_factor(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """min(1, (t + 1) / warm-up), times (1 + cos(pi * t / T)) / 2 over the steps t after the warm-up."""
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return (step + 1) / warmup
    if config.lr_schedule == "constant":
        return 1.0
    return (1 + math.cos(math.pi * (step - warmup) / max(1, config.epochs * steps_per_epoch - warmup))) / 2


def _base(config: TrainConfig, model: nn.Module) -> Optimizer:
    kind = config.optimizer if config.is_plain else config.base
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.nesterov,
        )
    make = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    return make(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)


def _mask(config: TrainConfig, fisher_data: Any, steps_per_epoch: int) -> sparsesam.MaskRule:
    if config.optimizer == "sam-on":
        return sparsesam.fixed_mask(types=sparsesam.NORMALIZATION)
    pattern = sparsesam.as_pattern(config.pattern)
    sparsity = config.sparsity
    if sparsity is None and pattern.implied_sparsity is None:
        sparsity = 0.5
    common: dict[str, Any] = {
        "sparsity": sparsity,
        "pattern": pattern,
        "refresh": _refresh(config, steps_per_epoch),
        "seed": derive(config.seed, Purpose.MASK),
    }
    if config.optimizer == "ssam-f":
        return sparsesam.fisher_mask(
            fisher_data,
            cross_entropy,
            samples=config.fisher_samples,
            chunk=config.fisher_batch,
            labels=config.fisher_labels,
            **common,
        )
    if config.optimizer == "ssam-d":
        return sparsesam.dynamic_mask(
            drop=config.drop,
            drop_ratio=config.drop_ratio,
            growth=config.growth,
            total_steps=config.epochs * steps_per_epoch,
            **common,
        )
    if config.optimizer == "ssam-g":
        return sparsesam.Mask(score=sparsesam.GradientMagnitude(), **common)
    return sparsesam.random_mask(**common)


def _refresh(config: TrainConfig, steps_per_epoch: int) -> sparsesam.Refresh:
    if config.mask_steps is not None:
        return sparsesam.every_steps(config.mask_steps)
    if config.mask_epochs is not None:
        return sparsesam.every_epochs(config.mask_epochs, steps_per_epoch=steps_per_epoch)
    return sparsesam.manual()


def _rho_schedule(config: TrainConfig, steps_per_epoch: int) -> sparsesam.RhoSchedule | None:
    if config.rho_schedule == "warmup":
        return sparsesam.Warmup(max(1, round(config.rho_warmup_epochs * steps_per_epoch)))
    if config.rho_schedule == "cosine":
        return sparsesam.Cosine(config.epochs * steps_per_epoch, final=config.rho_final)
    if config.rho_schedule == "inverse-sqrt":
        return sparsesam.InverseSqrt()
    return None
