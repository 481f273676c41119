"""Chooses the optimizer that the study in docs/study.md recommends."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from sparsesam.groups import check_model
from sparsesam.sam import SAM, SharpnessAware
from sparsesam.variants import ExtrapolatedSAM


def recommended(
    base: Optimizer,
    model: nn.Module,
    *,
    cost: float = 1.0,
    noisy_labels: bool = False,
    strength: float | None = None,
) -> SharpnessAware:
    """Returns the optimizer for steps that may cost ``cost`` times the base optimizer's, as the study recommends it.

    | ``cost``  | returns                                | ``strength``, default | with ``noisy_labels``       |
    |-----------|----------------------------------------|-----------------------|-----------------------------|
    | below 1.1 | `ExtrapolatedSAM`: one pass            | ``steps_ahead``, 10   | 60 with batch normalization |
    | below 2   | `SAM`, ascent on a part of the batch   | ``rho``, 0.05         | 0.2                         |
    | 2 or more | `SAM`                                  | ``rho``, 0.05         | 0.2                         |

    On small networks trained for so long that SGD memorizes wrong labels, one pass had at least 70 % of SAM's gain;
    over an SGD that stops in time, SAM's gain cannot be told from chance. All of this was measured in short training
    runs on one CPU, nothing on ImageNet: see docs/study.md.

    Args:
        base: the optimizer that takes the step.
        model: the module whose parameters ``base`` holds.
        cost: what a step may cost, in steps of the base optimizer. Between 1.1 and 2, the step is
            ``opt.step(closure, batch=(x, y))`` with a closure that takes the batch.
        noisy_labels: whether many of the training labels are wrong, so that fitting them does harm. A stronger
            perturbation prevents that, but is too strong for correct labels.
        strength: the one number to tune: try half and twice. If the training loss does not fall, it is too large.

    Examples:
        >>> opt = sparsesam.recommended(base, model)
        >>> loss = opt.step(closure)
    """
    if not (isinstance(cost, int | float) and cost >= 1):
        raise ValueError(f"cost must be at least 1, got {cost}; 1 is a step of the base optimizer, 2 one of SAM")
    check_model(model)
    has_batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    # Networks without batch normalization do not train with a longer extrapolation.
    usual, for_noisy_labels = (10.0, 60.0 if has_batch_norm else 10.0) if cost < 1.1 else (0.05, 0.2)
    if strength is None:
        strength = for_noisy_labels if noisy_labels else usual
    if cost < 1.1:
        return ExtrapolatedSAM(base, model, strength)
    return SAM(base, model, strength, ascent_fraction=min(cost - 1, 1.0))
