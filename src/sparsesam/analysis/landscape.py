"""Loss landscapes: the loss around a model along directions, and on the line between two checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from sparsesam.analysis.directions import Direction, check_directions, random_directions
from sparsesam.analysis.grid import MovedTensor, Progress, evaluate_grid
from sparsesam.analysis.objective import Objective, ObjectiveSummary, ParameterFilter, check_state, norm, values_kept
from sparsesam.analysis.results import AnalysisResult, Array
from sparsesam.masks.checks import check_count

_ONE_DIMENSIONAL_NOTES = {
    "ignore": "biases and normalization parameters do not move",
    "normalize": "biases and normalization parameters move too, each entry by its own size",
}
_INTERPOLATED = "running statistics are interpolated; statistics='recomputed' recomputes them at each point"


@dataclass(frozen=True)
class Landscape(AnalysisResult):
    """loss[j, i] = f(w + x[i] * d_x + y[j] * d_y); a line has an empty ``y`` and loss[i].

    ``lengths`` are the norms of the directions: x * lengths[0] is a distance in weight space. ``seed`` is None
    where the directions were given. Points whose loss is not finite are kept as such and counted.
    """

    kind: str
    x: Array
    y: Array
    loss: Array
    center_loss: float
    lengths: list[float]
    weights_moved: int
    seed: int | None
    not_finite: int
    measured_on: ObjectiveSummary
    notes: list[str]


def loss_landscape(
    objective: Objective,
    *,
    dimensions: Literal[1, 2] = 2,
    points: int = 50,
    span: tuple[float, float] = (-1.0, 1.0),
    seed: int = 0,
    directions: Sequence[Mapping[str, Tensor]] | None = None,
    parameters: ParameterFilter = None,
    one_dimensional: Literal["ignore", "normalize"] = "ignore",
    state_file: str | os.PathLike[str] | None = None,
    save_every: float = 10.0,
    progress: Progress | None = None,
) -> Landscape:
    """The loss on ``points`` (by ``points``) points over ``span`` along filter-normalized random directions.

    ``directions`` replaces the random ones, for example by ``HessianSpectrum.vectors``; they are used as they
    are, so unit vectors make x and y distances. ``state_file``, written every ``save_every``
    seconds, makes it resumable; ``progress(done, total)`` is called after every point. The weights are restored bit
    for bit, also after an exception.
    """
    if dimensions not in (1, 2):
        raise ValueError(f"dimensions must be 1 or 2, got {dimensions}")
    axes = [_axis(points, span)] * dimensions
    options: dict[str, Any] = {"state_file": state_file, "save_every": save_every, "progress": progress}
    if directions is not None:
        if len(directions) < dimensions:
            raise ValueError(f"directions must hold {dimensions} for {dimensions} dimensions, got {len(directions)}")
        chosen = check_directions(list(directions)[:dimensions], objective.model)
        return _evaluate(objective, _moving(objective, chosen), axes, "given directions", [], **options)
    chosen = random_directions(
        objective.model, dimensions, seed=seed, parameters=parameters, one_dimensional=one_dimensional
    )
    notes = [_ONE_DIMENSIONAL_NOTES[one_dimensional]]
    kind = "filter-normalized random directions"
    return _evaluate(objective, _moving(objective, chosen), axes, kind, notes, seed, **options)


def loss_between(
    objective: Objective,
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    *,
    points: int = 51,
    span: tuple[float, float] = (0.0, 1.0),
    state_file: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Landscape:
    """The loss on the line from one state dict (x = 0) to another (x = 1) of the same model.

    With frozen statistics, running statistics are interpolated like the weights, which raises the loss between
    networks with batch normalization; ``Objective(statistics="recomputed")`` avoids this. Buffers
    of whole numbers are the first checkpoint's.
    """
    axis = _axis(points, span)
    model = objective.model
    for label, state in (("first", first), ("second", second)):
        check_state(model, state, label)
    frozen = objective.statistics == "frozen" and any(True for _ in model.buffers())
    with values_kept([*model.parameters(), *model.buffers()]):
        model.load_state_dict(first)
        moving = [
            MovedTensor(name, tensor.detach(), [second[name].detach().to(tensor) - tensor.detach()])
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if name in second and tensor.is_floating_point()
        ]
        kind, notes = "line between two checkpoints", [_INTERPOLATED] if frozen else []
        return _evaluate(objective, moving, [axis], kind, notes, state_file=state_file, progress=progress)


def _moving(objective: Objective, directions: Sequence[Direction]) -> list[MovedTensor]:
    return [
        MovedTensor(name, parameter.detach(), [direction.get(name) for direction in directions])
        for name, parameter in objective.model.named_parameters()
        if any(name in direction for direction in directions)
    ]


def _axis(points: int, span: tuple[float, float]) -> Array:
    check_count("points", points, "the paper's pictures have 50 by 50", least=2)
    if not (math.isfinite(span[0]) and math.isfinite(span[1]) and span[0] < span[1]):
        raise ValueError(f"span must be (low, high) with low < high, got {span}")
    return np.linspace(*span, points)


def _evaluate(
    objective: Objective,
    moving: Sequence[MovedTensor],
    axes: Sequence[Array],
    kind: str,
    notes: list[str],
    seed: int | None = None,
    **options: Any,
) -> Landscape:
    with objective.measuring():
        center = objective.loss()
        loss = evaluate_grid(objective, moving, axes, **options)
    not_finite = int((~np.isfinite(loss)).sum())
    if not_finite:
        notes = [*notes, f"the loss of {not_finite} points is not finite"]
    directions = zip(*(one.along for one in moving), strict=True)
    return Landscape(
        kind=kind,
        x=axes[0],
        y=axes[1] if len(axes) == 2 else np.zeros(0),
        loss=loss,
        center_loss=center,
        lengths=[norm(part for part in direction if part is not None) for direction in directions],
        weights_moved=sum(one.tensor.numel() for one in moving),
        seed=seed,
        not_finite=not_finite,
        measured_on=objective.summary(),
        notes=notes,
    )
