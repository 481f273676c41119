"""Sharpness as SAM means it: how far the loss rises within a ball of radius rho around the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsesam.analysis.objective import (
    Objective,
    ObjectiveSummary,
    ParameterFilter,
    check_masks,
    norm,
    select_parameters,
    values_kept,
)
from sparsesam.analysis.results import AnalysisResult
from sparsesam.masks.checks import check_count


@dataclass(frozen=True)
class Sharpness(AnalysisResult):
    """``increase`` = max_{||e|| <= rho} f(w + m ⊙ e) - f(w), as found by gradient ascent: a lower bound.

    ``one_step`` is the increase by SAM's own single step. ``path`` holds the best loss after each evaluation.
    """

    rho: float
    loss: float
    max_loss: float
    increase: float
    one_step: float
    path: list[float]
    masked: bool
    weights_perturbed: int
    measured_on: ObjectiveSummary
    notes: list[str]


def sharpness(
    objective: Objective,
    rho: float = 0.05,
    *,
    steps: int = 20,
    starts: int = 1,
    masks: Mapping[str, Tensor] | None = None,
    parameters: ParameterFilter = None,
    seed: int = 0,
) -> Sharpness:
    """Projected gradient ascent of ``steps`` gradients, begun with SAM's step and kept at its best point:

        e <- P(e + a * m ⊙ g(w + e) / ||m ⊙ g(w + e)||),    P the projection onto ||e|| <= rho

    a is rho at first and is halved whenever the loss did not rise. Further ``starts`` begin at random points of
    the sphere. With ``masks`` only their weights move, over the whole radius (``norm="masked"``); SSAM's paper
    form takes the shorter step rho * ||m ⊙ g|| / ||g||, which the ball contains.
    """
    if not 0 < rho < math.inf:
        raise ValueError(f"rho must be positive and finite, got {rho}")
    check_count("steps", steps, "1 is SAM's own step")
    check_count("starts", starts, "the first begins with SAM's step, others at random")
    chosen = select_parameters(objective.model, parameters)
    kept = None if masks is None else list(check_masks(masks, chosen).values())
    perturbed = sum(t.numel() for t in chosen.values()) if kept is None else sum(int(mask.sum()) for mask in kept)
    if perturbed == 0:
        raise ValueError("masks keep no weight, so nothing can be perturbed; at least one is needed")
    generator = torch.Generator().manual_seed(seed)
    with objective.measuring(chosen.values()):
        climb = _Climb(objective, list(chosen.values()), kept, rho)
        with values_kept(climb.tensors, climb.saved):
            for number in range(starts):
                climb.run(steps, None if number == 0 else generator)
    notes = ["found by gradient ascent: a lower bound of the true maximum"]
    if not math.isfinite(climb.best):
        notes.append("the loss is not finite somewhere within the ball")
    return Sharpness(
        rho=rho,
        loss=climb.loss,
        max_loss=climb.best,
        increase=climb.best - climb.loss,
        one_step=climb.one_step - climb.loss,
        path=climb.path,
        masked=masks is not None,
        weights_perturbed=perturbed,
        measured_on=objective.summary(),
        notes=notes,
    )


class _Climb:
    """The ascent: the weights are at w + e while it runs."""

    def __init__(self, objective: Objective, tensors: list[Tensor], masks: list[Tensor] | None, rho: float) -> None:
        self.objective, self.tensors, self.masks, self.rho = objective, tensors, masks, rho
        self.saved = [tensor.detach().clone() for tensor in tensors]
        self.loss, gradient = objective.gradient(tensors)
        self.home = self._unit(gradient)
        self.best, self.one_step, self.path = self.loss, math.nan, [self.loss]

    def run(self, steps: int, generator: torch.Generator | None) -> None:
        direction = self.home if generator is None else self._random(generator)
        if direction is None:  # a critical point: any direction will do
            direction = self._random(torch.Generator().manual_seed(0))
        place, at, stride = [torch.zeros_like(t) for t in self.tensors], -math.inf, self.rho
        for _ in range(steps):
            trial = self._project([e.add(d, alpha=stride) for e, d in zip(place, direction, strict=True)])
            value, gradient = self._at(trial)
            if math.isnan(self.one_step) and generator is None:
                self.one_step = value
            if not math.isfinite(value):
                self.best = math.inf
                return
            self.best = max(self.best, value)
            self.path.append(self.best)
            if value > at:
                found = self._unit(gradient)
                if found is None:
                    return
                place, at, direction = trial, value, found
            else:
                stride /= 2

    def _at(self, perturbation: Sequence[Tensor]) -> tuple[float, list[Tensor]]:
        with torch.no_grad():
            for tensor, base, e in zip(self.tensors, self.saved, perturbation, strict=True):
                torch.add(base, e, out=tensor.detach())
        return self.objective.gradient(self.tensors)

    def _unit(self, vector: list[Tensor]) -> list[Tensor] | None:
        if self.masks is not None:
            vector = [v * mask for v, mask in zip(vector, self.masks, strict=True)]
        length = norm(vector)
        return [v / length for v in vector] if 0 < length < math.inf else None

    def _random(self, generator: torch.Generator) -> list[Tensor]:
        noise = [torch.randn(t.shape, generator=generator, dtype=torch.float32).to(t) for t in self.tensors]
        found = self._unit(noise)
        assert found is not None
        return found

    def _project(self, vector: list[Tensor]) -> list[Tensor]:
        length = norm(vector)
        return vector if length <= self.rho else [v * (self.rho / length) for v in vector]
