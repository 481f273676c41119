"""Small smooth functions to run an optimizer on, with the constants that theorems 1 and 2 assume."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SmoothProblem:
    """A function f(w) of a small module's weights. ``L`` and ``G`` are known bounds, None if there are none."""

    make: Callable[[], nn.Module]
    name: str
    L: float | None = None
    G: float | None = None


class _Function(nn.Module):
    """A function of its parameters, which begin at ``start``."""

    def __init__(self, start: Mapping[str, Tensor], function: Callable[..., Tensor]) -> None:
        super().__init__()
        for name, value in start.items():
            self.register_parameter(name, nn.Parameter(value.clone()))
        self.function = function

    def forward(self) -> Tensor:
        return self.function(**dict(self.named_parameters()))


def nonconvex_logistic(*, samples: int = 200, size: int = 20, weight: float = 0.1, seed: int = 0) -> SmoothProblem:
    """f(w) = mean log(1 + exp(-y x·w)) + weight * sum w² / (1 + w²): smooth, not convex, gradient bounded.

    L <= ||X||² / (4 samples) + 2 weight and G <= mean ||x|| + weight * sqrt(size) * 3 sqrt(3) / 8 everywhere.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, size, generator=generator, dtype=torch.float64)
    truth = torch.randn(size, generator=generator, dtype=torch.float64)
    y = torch.sign(x @ truth + torch.randn(samples, generator=generator, dtype=torch.float64))
    start = 2 * torch.randn(size, generator=generator, dtype=torch.float64)

    def f(w: Tensor) -> Tensor:
        return nn.functional.softplus(-y * (x @ w)).mean() + weight * (w.square() / (1 + w.square())).sum()

    smooth = float(torch.linalg.matrix_norm(x, 2)) ** 2 / (4 * samples) + 2 * weight
    gradient = float(x.norm(dim=1).mean()) + weight * math.sqrt(size) * 3 * math.sqrt(3) / 8
    make = partial(_Function, {"w": start}, f)
    return SmoothProblem(make, "logistic loss with the non-convex regularizer w² / (1 + w²)", smooth, gradient)


def tanh_network(*, samples: int = 64, hidden: int = 5, seed: int = 0) -> SmoothProblem:
    """Squared error of a small tanh network on noisy targets: smooth; L and G are known only along the runs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    y = torch.sin(x.sum(1, keepdim=True)) + 0.1 * torch.randn(samples, 1, generator=generator, dtype=torch.float64)
    shapes = {"first": (hidden, 3), "bias": (hidden,), "second": (1, hidden)}
    start = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}

    def f(first: Tensor, bias: Tensor, second: Tensor) -> Tensor:
        inner = torch.tanh(nn.functional.linear(x, first, bias))
        return (nn.functional.linear(inner, second) - y).square().mean()

    make = partial(_Function, start, f)
    return SmoothProblem(make, f"squared error of a tanh network with {hidden} hidden units")
