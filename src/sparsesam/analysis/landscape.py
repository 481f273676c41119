"""Loss landscapes: the loss along directions from a model's weights, and on the line between two checkpoints."""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sparsesam.analysis.objective import Objective, ParameterFilter, moving, norm, select_parameters
from sparsesam.analysis.results import Array, Measurement
from sparsesam.distributed.ddp import unwrap
from sparsesam.masks.fixed import NORMALIZATION, is_layer_of
from sparsesam.utils.checks import check_count, check_like_parameters

Direction = dict[str, Tensor]
ProgressCallback = Callable[[int, int], None]

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_INTERPOLATED = "running statistics are interpolated; statistics='recomputed' recomputes them at each point"


@dataclass(frozen=True)
class Landscape(Measurement):
    """loss[j, i] = f(w + x[i] * d_x + y[j] * d_y); a line has an empty ``y`` and loss[i].

    ``lengths`` are the norms of the directions: x * lengths[0] is a distance in weight space. ``not_finite`` counts
    losses that are NaN or infinite.
    """

    x: Array
    y: Array
    loss: Array
    center_loss: float
    lengths: list[float]
    weights_moved: int
    not_finite: int


def loss_landscape(
    objective: Objective,
    directions: Sequence[Mapping[str, Tensor]] | None = None,
    *,
    points: int = 50,
    span: tuple[float, float] = (-1.0, 1.0),
    state_file: str | os.PathLike[str] | None = None,
    progress: ProgressCallback = lambda done, total: None,
) -> Landscape:
    """Evaluate the loss on ``points`` points over ``span`` along each direction: a line for one, a plane for two.

    ``directions`` are two `random_directions` by default, or for example ``HessianSpectrum.vectors[:2]``; they are not
    rescaled, and may also move floating-point buffers. ``state_file``, a text file with the losses so far, makes the
    evaluation resumable; ``progress(done, total)`` is called after every point.
    """
    chosen = random_directions(objective.model) if directions is None else _checked(directions, objective.model)
    check_count("points", points, "the paper's figures have 50 by 50", least=2)
    if not (math.isfinite(span[0]) and math.isfinite(span[1]) and span[0] < span[1]):
        raise ValueError(f"span must be (low, high) with low < high, got {span}")
    axis, dimensions = np.linspace(*span, points), len(chosen)
    named = _named_tensors(objective.model)
    tensors = {name: named[name] for name in named if any(name in direction for direction in chosen)}
    along = [[direction.get(name) for name in tensors] for direction in reversed(chosen)]
    grid = list(itertools.product(axis.tolist(), repeat=dimensions))
    with objective.measuring(), moving(list(tensors.values())) as move:
        center = objective.loss()
        file = None if state_file is None else Path(state_file)
        losses = [] if file is None else _open_state(file, _fingerprint(objective, chosen, axis))
        for point in grid[len(losses) :]:
            move(*zip(along, point, strict=True))
            losses.append(objective.loss())
            if file is not None:
                with file.open("a") as state:
                    state.write(f"{losses[-1]!r}\n")
            progress(len(losses), len(grid))
    y, loss = axis if dimensions == 2 else np.zeros(0), np.reshape(losses, [points] * dimensions)
    lengths, moved = [norm(d.values()) for d in chosen], sum(tensor.numel() for tensor in tensors.values())
    return Landscape(axis, y, loss, center, lengths, moved, int((~np.isfinite(loss)).sum()), **objective.measured())


def loss_between(
    objective: Objective,
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    *,
    points: int = 51,
    span: tuple[float, float] = (0.0, 1.0),
    **options: Any,
) -> Landscape:
    """Evaluate the loss on the line from one state dict (x = 0) to another (x = 1) of the same model.

    ``options`` are those of `loss_landscape`.

    With frozen statistics, running statistics are interpolated like the weights, which raises the loss between
    networks with batch normalization; ``Objective(statistics="recomputed")`` avoids this. Integer buffers are those
    of the first checkpoint.
    """
    model = objective.model
    start, end = copy.deepcopy((first, second))  # either may be the model's own, which is overwritten
    floating = {name: tensor for name, tensor in _named_tensors(model).items() if tensor.is_floating_point()}
    with moving([*model.parameters(), *model.buffers()]), torch.no_grad():
        model.load_state_dict(end)
        way = {name: tensor.clone() for name, tensor in floating.items()}
        model.load_state_dict(start)
        for name, tensor in floating.items():
            way[name] -= tensor
        result = loss_landscape(objective, [way], points=points, span=span, **options)
    frozen = objective.statistics == "frozen" and any(True for _ in model.buffers())
    return replace(result, notes=[_INTERPOLATED]) if frozen else result


def random_directions(
    model: nn.Module, count: int = 2, *, seed: int = 0, parameters: ParameterFilter = None
) -> list[Direction]:
    """Filter-normalized Gaussian directions (Li et al. 2018): for every output filter i

        d_i <- d_i / ||d_i|| * ||w_i||

    Biases and normalization parameters do not move, as in the authors' own figures. The Gaussian numbers depend only on
    the seed and the shapes, so that all checkpoints of a model get the same, each scaled to its own weights.
    """
    model = unwrap(model)
    chosen = select_parameters(model, parameters)
    generator = torch.Generator().manual_seed(seed)
    directions: list[Direction] = []
    for _ in range(count):
        direction: Direction = {}
        for name, weight in chosen.items():
            # Drawn even if unused: ignoring a parameter must not change the numbers of the others.
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32).to(weight)
            layer = model.get_submodule(name.rpartition(".")[0])
            if weight.dim() > 1 and not is_layer_of(layer, NORMALIZATION):
                axis = 1 if isinstance(layer, _TRANSPOSED) else 0
                others = [dimension for dimension in range(weight.dim()) if dimension != axis]
                have, want = (torch.linalg.vector_norm(t.detach(), dim=others, keepdim=True) for t in (noise, weight))
                direction[name] = noise * (want / have.clamp_min(torch.finfo(have.dtype).tiny))
        directions.append(direction)
    if directions and not directions[0]:
        raise ValueError("no parameter that is selected has two dimensions; the others do not move")
    return directions


def _checked(directions: Sequence[Mapping[str, Tensor]], model: nn.Module) -> list[Direction]:
    """Returns directions on the devices and in the dtypes of the model's tensors; ValueError for names or shapes."""
    if len(directions) not in (1, 2) or not all(directions):
        raise ValueError(f"directions must be one or two, got {len(directions)} or an empty one; two span a plane")
    # Not integer buffers, such as the number of batches of a normalization: they cannot move by a part of the way.
    known = {name: t for name, t in _named_tensors(model).items() if t.is_floating_point() or t.is_complex()}
    for number, direction in enumerate(directions):
        check_like_parameters(f"directions[{number}]", direction, known, "parameter or buffer that can be moved")
    return [{name: value.detach().to(known[name]) for name, value in direction.items()} for direction in directions]


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict((*model.named_parameters(), *model.named_buffers()))


def _open_state(path: Path, fingerprint: str) -> list[float]:
    """Returns the losses in the state file: the fingerprint, then a line for each point. Create it if it is missing."""
    text = path.read_text(errors="replace") if path.exists() else f"{fingerprint}\n"
    complete = text[: text.rfind("\n") + 1]  # a killed process may leave an unfinished line
    first, *lines = complete.split("\n")[:-1] or [text]
    if first != fingerprint:
        raise ValueError(
            f"state_file {path} is of another landscape, or is not a state file; remove it, or choose another name"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(complete)
    return [float(line) for line in lines]


def _fingerprint(objective: Objective, directions: Sequence[Direction], axis: Array) -> str:
    """Returns a hash of everything the losses depend on, except the code of model and loss."""
    digest = hashlib.blake2b(repr((objective.summary(), objective.weights)).encode(), digest_size=16)
    grid = [[axis.tolist()] * len(directions), [list(direction.items()) for direction in directions]]
    # Includes the tensors that do not move: they differ between checkpoints.
    for leaf in tree_leaves([grid, list(_named_tensors(objective.model).values()), objective.batches]):
        if isinstance(leaf, Tensor):
            digest.update(repr((leaf.dtype, tuple(leaf.shape))).encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(repr(leaf).encode() if isinstance(leaf, (str, int, float, type(None))) else b"other")
    return digest.hexdigest()
