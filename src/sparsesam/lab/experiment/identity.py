"""Which settings of a run have no influence on its result: two runs that differ only in those are the same run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsesam.lab.experiment.config import TrainConfig

_FISHER = ("fisher_samples", "fisher_batch", "fisher_labels")
_DYNAMIC = ("drop", "drop_ratio", "growth")
_MASK = ("sparsity", "pattern", "norm", "mask_epochs", "mask_steps", *_FISHER, *_DYNAMIC)
_ASCENT = (
    *("base", "rho", "rho_schedule", "rho_warmup_epochs", "rho_final", "adaptive", "eta", "engine"),
    *("ascent", "steps_ahead", "ascent_fraction", "ascent_every", "ascent_off_steps", "ascent_start"),
)


def canonical(config: TrainConfig) -> TrainConfig:
    """The config with every setting that its result does not depend on at its default."""
    defaults = type(config)()
    return dataclasses.replace(config, **{name: getattr(defaults, name) for name in unused(config)})


def unused(config: TrainConfig) -> Iterator[str]:
    if config.is_plain:
        yield from (*_ASCENT, *_MASK)
    elif config.optimizer == "auto":
        yield from (*(name for name in _ASCENT if name not in ("base", "steps_ahead")), *_MASK)
    else:
        if config.optimizer in ("sam", "asam"):
            yield from _MASK
        if config.optimizer != "ssam-f":
            yield from _FISHER
        if config.optimizer != "ssam-d":
            yield from _DYNAMIC
        if config.mask_steps is not None:
            yield "mask_epochs"
        if not config.adaptive and config.optimizer != "asam":
            yield "eta"
        if config.rho_schedule != "warmup":
            yield "rho_warmup_epochs"
        if config.rho_schedule != "cosine":
            yield "rho_final"
        if config.ascent != "extrapolation":
            yield "steps_ahead"
        else:
            yield from ("rho", "adaptive", "eta", "norm", "ascent_fraction", "ascent_off_steps", "engine")
        if config.optimizer == "sam-on":
            yield from ("sparsity", "pattern", "mask_epochs", "mask_steps")
        if config.ascent_every == 1:
            yield "ascent_off_steps"
    if (config.optimizer if config.is_plain else config.base) == "sgd":
        yield "betas"
    else:
        yield from ("momentum", "nesterov")
    if config.lr_schedule != "step":
        yield from ("lr_milestones", "lr_gamma")
    if not config.corruption_rate:
        yield "corruption"
    if not config.randaugment:
        yield "randaugment_magnitude"
