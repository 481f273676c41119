"""Chooses the optimizer that the study in docs/study.md recommends."""

from __future__ import annotations

import warnings

from torch import nn
from torch.optim import Optimizer

from sparsesam.sam import SAM

#: The part of the batch that the ascent is computed from; it costs as much of a step.
ASCENT_FRACTION = 1 / 8


def recommended(base: Optimizer, model: nn.Module, rho: float = 0.05, *, cost: float = 1.25) -> SAM:
    """Returns what was at least as good as a tuned SGD on every task of the study, for steps of at most this cost.

    From a cost of 1.125 on, that is `SAM` with ``ascent_fraction=1/8``: the perturbation is computed from an eighth of
    the batch. Below, nothing was as good on every task: then the steps are those of the base optimizer, `SAM` with
    rho = 0, and a warning says so.

    Args:
        base: the optimizer that takes the step.
        model: the module whose parameters ``base`` holds.
        rho: the number to tune, together with the weight decay: try half and twice. If the training loss does not fall,
            it is too large.
        cost: what a step may cost, in passes of the base optimizer. Small networks need more time than that.

    Examples:
        >>> opt = sparsesam.recommended(base, model, cost=1.25)
        >>> loss = opt.minimize(lambda batch: loss_fn(model(batch[0]), batch[1]), batch=(x, y))
    """
    if not (isinstance(cost, int | float) and cost >= 1):
        raise ValueError(f"cost must be at least 1, got {cost}; 1 is a step of the base optimizer, 1.25 is the default")
    if cost >= 1 + ASCENT_FRACTION:
        return SAM(base, model, rho, ascent_fraction=ASCENT_FRACTION)
    warnings.warn(
        f"recommended: for cost={cost}, no method of the study was at least as good as a tuned SGD on every task: "
        "steps are those of the base optimizer. A cost of 1.25 perturbs; ExtrapolatedSAM, in one pass, gained on one "
        "task of three",
        stacklevel=2,
    )
    return SAM(base, model, 0.0)
