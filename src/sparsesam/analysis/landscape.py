"""Loss landscapes: the loss around a model along directions, and on the line between two checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from sparsesam.analysis.directions import Direction, check_directions, random_directions
from sparsesam.analysis.grid import Grid, MovedTensor, Progress, evaluate_grid
from sparsesam.analysis.objective import Objective, ObjectiveSummary, ParameterFilter, check_state, norm, values_kept
from sparsesam.analysis.results import AnalysisResult, Array
from sparsesam.masks.checks import check_count

_ONE_DIMENSIONAL_NOTES = {
    "ignore": "biases and normalization parameters do not move",
    "normalize": "biases and normalization parameters move too, each entry by its own size",
}


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

    def __post_init__(self) -> None:
        shape = (len(self.y), len(self.x)) if len(self.y) else (len(self.x),)
        if self.loss.shape != shape:
            raise ValueError(f"loss must have the shape {shape} of the grid, got {self.loss.shape}")


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
    _check_grid(dimensions, points, span)
    if directions is None:
        chosen = random_directions(
            objective.model, dimensions, seed=seed, parameters=parameters, one_dimensional=one_dimensional
        )
    else:
        if len(directions) < dimensions:
            raise ValueError(f"directions must hold {dimensions} for {dimensions} dimensions, got {len(directions)}")
        chosen = check_directions(list(directions)[:dimensions], objective.model)
    x = np.linspace(*span, points)
    grid = Grid(_moving(objective, chosen), x, x.copy() if dimensions == 2 else np.zeros(0))
    with objective.measuring():
        center = objective.loss()
        loss = evaluate_grid(objective, grid, state_file=state_file, save_every=save_every, progress=progress)
    kind = "given directions" if directions is not None else "filter-normalized random directions"
    notes = [] if directions is not None else [_ONE_DIMENSIONAL_NOTES[one_dimensional]]
    return _result(objective, kind, grid, loss, center, chosen, None if directions is not None else seed, notes)


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
    _check_grid(1, points, span)
    for label, state in (("first", first), ("second", second)):
        check_state(objective.model, state, label)
    with values_kept([*objective.model.parameters(), *objective.model.buffers()]):
        objective.model.load_state_dict(first)
        moving = _line(objective, second)
        grid = Grid(moving, np.linspace(*span, points), np.zeros(0))
        with objective.measuring():
            center = objective.loss()
            loss = evaluate_grid(objective, grid, state_file=state_file, progress=progress)
    frozen = objective.statistics == "frozen" and any(True for _ in objective.model.buffers())
    notes = (
        ["running statistics are interpolated; statistics='recomputed' recomputes them at each point"] if frozen else []
    )
    direction = {one.name: one.along_x for one in moving if one.along_x is not None}
    return _result(objective, "line between two checkpoints", grid, loss, center, [direction], None, notes)


def _line(objective: Objective, second: Mapping[str, Tensor]) -> list[MovedTensor]:
    moving = []
    for name, tensor in (*objective.model.named_parameters(), *objective.model.named_buffers()):
        if name in second and tensor.is_floating_point():
            base = tensor.detach().clone()
            moving.append(MovedTensor(name, tensor.detach(), base, second[name].detach().to(base) - base))
    return moving


def _moving(objective: Objective, directions: Sequence[Direction]) -> list[MovedTensor]:
    parameters = dict(objective.model.named_parameters())
    names = {name: None for direction in directions for name in direction}
    return [
        MovedTensor(
            name, parameters[name].detach(), parameters[name].detach().clone(), *(d.get(name) for d in directions)
        )
        for name in names
    ]


def _result(
    objective: Objective,
    kind: str,
    grid: Grid,
    loss: Array,
    center: float,
    directions: Sequence[Mapping[str, Tensor]],
    seed: int | None,
    notes: list[str],
) -> Landscape:
    lengths = [norm(d.values()) for d in directions]
    bad = int((~np.isfinite(loss)).sum())
    if bad:
        notes = [*notes, f"the loss of {bad} points is not finite"]
    moved = sum(one.tensor.numel() for one in grid.moving)
    return Landscape(kind, grid.x, grid.y, loss, center, lengths, moved, seed, bad, objective.summary(), notes)


def _check_grid(dimensions: int, points: int, span: tuple[float, float]) -> None:
    if dimensions not in (1, 2):
        raise ValueError(f"dimensions must be 1 or 2, got {dimensions}")
    check_count("points", points, "the paper's pictures have 50 by 50", least=2)
    if not (math.isfinite(span[0]) and math.isfinite(span[1]) and span[0] < span[1]):
        raise ValueError(f"span must be (low, high) with low < high, got {span}")
