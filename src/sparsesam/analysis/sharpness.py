"""Sharpness as SAM defines it: the largest increase of the loss within a ball of radius rho around the weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsesam.analysis.objective import Objective, check_masks, moving, norm, select_parameters
from sparsesam.analysis.results import Measurement
from sparsesam.utils.checks import check_count


@dataclass(frozen=True)
class Sharpness(Measurement):
    """``increase`` = max_{||e|| <= rho} f(w + m ⊙ e) - f(w), as found by gradient ascent: a lower bound.

    ``one_step`` is the increase after SAM's own single step. ``path`` holds the highest loss after each evaluation.
    """

    rho: float
    loss: float
    max_loss: float
    increase: float
    one_step: float
    path: list[float]
    weights_perturbed: int


def sharpness(
    objective: Objective,
    rho: float = 0.05,
    *,
    steps: int = 20,
    masks: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> Sharpness:
    """Projected gradient ascent with ``steps`` gradients; starts with SAM's step and continues from its best point:

        e <- P(e + a * m ⊙ g(w + e) / ||m ⊙ g(w + e)||),    P the projection onto ||e|| <= rho

    a is rho at first and is halved whenever the loss did not rise. At a critical point the first step is random,
    drawn from ``seed``. With ``masks`` only their weights move, over the whole radius (``norm="masked"``); the paper's
    form of SSAM takes the shorter step rho * ||m ⊙ g|| / ||g||, which is inside the ball.
    """
    if not 0 < rho < math.inf:
        raise ValueError(f"rho must be positive and finite, got {rho}")
    check_count("steps", steps, "1 is SAM's own step")
    chosen = select_parameters(objective.model)
    tensors, kept = list(chosen.values()), list(check_masks(masks, chosen).values())
    perturbed = sum(int(mask.sum()) for mask in kept)
    if perturbed == 0:
        raise ValueError("masks keep no weight, so nothing can be perturbed; at least one weight is needed")

    def unit(vector: list[Tensor]) -> list[Tensor] | None:
        """Returns the masked vector with norm 1, None if it has no direction."""
        masked = [v * mask for v, mask in zip(vector, kept, strict=True)]
        length = norm(masked)
        return [v / length for v in masked] if 0 < length < math.inf else None

    with objective.measuring(tensors), moving(tensors) as move:
        loss, gradient = objective.gradient(tensors)
        generator = torch.Generator().manual_seed(seed)
        direction = unit(gradient) or unit([torch.randn(t.shape, generator=generator).to(t) for t in tensors])
        e, highest, stride = [torch.zeros_like(t) for t in tensors], -math.inf, rho
        values: list[float] = []
        while direction is not None and len(values) < steps:
            trial = [a.add(d, alpha=stride) for a, d in zip(e, direction, strict=True)]
            if (length := norm(trial)) > rho:
                trial = [a * (rho / length) for a in trial]
            move((trial, 1.0))
            value, gradient = objective.gradient(tensors)
            values.append(value)
            if not math.isfinite(value):
                break
            if value > highest:
                e, highest, direction = trial, value, unit(gradient)
            else:
                stride /= 2
    notes = ["found by gradient ascent: a lower bound on the true maximum"]
    path = list(itertools.accumulate((loss, *filter(math.isfinite, values)), max))
    max_loss = path[-1]
    if not math.isfinite(values[-1]):
        max_loss = math.inf
        notes.append("the loss is not finite somewhere within the ball")
    increase, one_step, made = max_loss - loss, values[0] - loss, objective.measured(*notes)
    return Sharpness(rho, loss, max_loss, increase, one_step, path, perturbed, **made)
