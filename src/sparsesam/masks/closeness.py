"""Whether two computations of the same number agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def _tolerance(tensor: Tensor) -> float:
    """Far above what another order of summation does, far below what a wrong formula does."""
    if torch.is_autocast_enabled(tensor.device.type):
        return 5e-2
    return {torch.float64: 1e-7, torch.float32: 1e-3}.get(tensor.dtype, 5e-2)


def close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(_tensors_close, found, expected))


def _tensors_close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    # Masked scores are -inf in both.
    difference = torch.where(found == expected, torch.zeros_like(found), found - expected)
    return bool(difference.norm() <= _tolerance(found) * expected.nan_to_num(0, 0, 0).norm())


def different(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> set[str]:
    """Names whose root squares differ, beyond rounding of the largest: some gradients are zero but for it."""
    norms = {name: square.sum().sqrt().item() for name, square in expected.items()}
    floor = 1e-3 * max(norms.values())
    return {
        name
        for name, square in expected.items()
        if (found[name].sqrt() - square.sqrt()).norm().item() > _tolerance(square) * (norms[name] + floor)
    }
