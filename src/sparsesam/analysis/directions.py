"""Directions in weight space: one tensor per parameter that moves, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from sparsesam.analysis.objective import ParameterFilter, select_parameters
from sparsesam.masks.checks import check_choice, check_like_parameters
from sparsesam.masks.fixed import NORMALIZATION
from sparsesam.parameters import unwrap

Direction = dict[str, Tensor]

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def random_directions(
    model: nn.Module,
    count: int = 2,
    *,
    seed: int = 0,
    parameters: ParameterFilter = None,
    one_dimensional: Literal["ignore", "normalize"] = "ignore",
) -> list[Direction]:
    """Filter-normalized Gaussian directions (Li et al. 2018): for every output filter i

        d_i <- d_i / ||d_i|| * ||w_i||

    Biases and normalization parameters stand still, as in the authors' own pictures;
    ``one_dimensional="normalize"`` moves them too, each entry being a filter of its own.

    The Gaussian numbers depend on the seed and the shapes alone, so checkpoints of one model get the same
    directions, each scaled to its own weights. They are drawn on the CPU, the same for every device.
    """
    check_choice("one_dimensional", one_dimensional, ("ignore", "normalize"))
    model = unwrap(model)
    chosen = select_parameters(model, parameters)
    generator = torch.Generator().manual_seed(seed)
    directions: list[Direction] = []
    for _ in range(count):
        direction: Direction = {}
        for name, parameter in chosen.items():
            # Drawn even where it is not used: the choice of parameters must not change the others' numbers.
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            layer = model.get_submodule(name.rpartition(".")[0])
            if one_dimensional == "ignore" and (parameter.dim() < 2 or isinstance(layer, NORMALIZATION)):
                continue
            axis = 1 if isinstance(layer, _TRANSPOSED) else 0
            direction[name] = filter_normalized(noise.to(parameter), parameter.detach(), axis=axis)
        directions.append(direction)
    if directions and not directions[0]:
        raise ValueError("no parameter has two dimensions; pass one_dimensional='normalize' to move the others")
    return directions


def filter_normalized(direction: Tensor, weight: Tensor, *, axis: int = 0) -> Tensor:
    """The direction with each slice along ``axis`` scaled to the norm of the weight's; entries if 1-D."""
    others = [dimension for dimension in range(weight.dim()) if dimension != axis] if weight.dim() > 1 else []
    if not others:
        return direction.sign() * weight.abs()
    have = torch.linalg.vector_norm(direction, dim=others, keepdim=True)
    want = torch.linalg.vector_norm(weight, dim=others, keepdim=True)
    scaled: Tensor = direction * (want / have.clamp_min(torch.finfo(have.dtype).tiny))
    return scaled


def check_directions(directions: Sequence[Mapping[str, Tensor]], model: nn.Module) -> list[Direction]:
    """The directions on the parameters' devices and in their dtypes; ValueError for what does not fit."""
    known = dict(unwrap(model).named_parameters())
    checked: list[Direction] = []
    for number, direction in enumerate(directions):
        check_like_parameters(f"directions[{number}]", direction, known)
        if not direction:
            raise ValueError(f"directions[{number}] moves no parameter; give {{name: tensor}}")
        checked.append({name: values.detach().to(known[name]) for name, values in direction.items()})
    return checked
