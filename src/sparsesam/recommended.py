"""Sharpness-awareness in one call, as the study in docs/study.md recommends it."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from sparsesam.optimizer import SAM, ExtrapolatedSAM
from sparsesam.sharpness_aware import SharpnessAware

#: Where a search begins: between the best values of the study's tasks.
RHO = 0.2


def recommended(
    base: Optimizer, model: nn.Module, *, cost: float = 1.0, strength: float | None = None
) -> SharpnessAware:
    """Returns the optimizer for steps that may cost ``cost`` times the base optimizer's, as the study recommends it.

    | ``cost``  | returns                                | ``strength``, default                  |
    |-----------|----------------------------------------|----------------------------------------|
    | below 1.1 | `ExtrapolatedSAM`: one pass            | ``steps_ahead``, 60 or 10              |
    | below 2   | `SAM`, ascent on a part of the batch   | ``rho``, 0.2                           |
    | 2 or more | `SAM`                                  | ``rho``, 0.2                           |

    On small networks that would otherwise memorize wrong labels, one pass keeps 70 to 100 % of what SAM gains; where
    SAM itself gains nothing, so does this. All of it was measured in short trainings on one CPU, nothing on ImageNet:
    docs/study.md.

    Args:
        base: the optimizer that takes the step.
        model: the module whose parameters ``base`` holds.
        cost: what a step may cost, in steps of the base optimizer. Between 1.1 and 2, the step is
            ``opt.step(closure, batch=(x, y))`` with a closure that takes the batch.
        strength: the one number to tune: try half and twice. If the training loss does not fall, it is too large. The
            defaults suit labels of which some are wrong; with true ones, begin with 10 steps ahead or a rho of 0.05.

    Examples:
        >>> opt = sparsesam.recommended(base, model)
        >>> loss = opt.step(closure)
    """
    if not (isinstance(cost, int | float) and cost >= 1):
        raise ValueError(f"cost must be at least 1, got {cost}; 1 is a step of the base optimizer, 2 one of SAM")
    if cost < 1.1:
        return ExtrapolatedSAM(base, model, strength)
    rho = RHO if strength is None else strength
    return SAM(base, model, rho) if cost >= 2 else SAM(base, model, rho, ascent_fraction=cost - 1)
