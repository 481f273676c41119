"""Small smooth functions to run an optimizer on, with the constants that theorems 1 and 2 assume."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SmoothProblem:
    """A function f(w) of a small module's weights. ``L`` and ``G`` are known bounds, None if there are none."""

    make: Callable[[], nn.Module]
    name: str
    L: float | None = None
    G: float | None = None


class _Logistic(nn.Module):
    def __init__(self, x: Tensor, y: Tensor, weight: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(x.shape[1], dtype=torch.float64))
        self.register_buffer("x", x)
        self.register_buffer("y", y)
        self.weight = weight

    def forward(self) -> Tensor:
        assert isinstance(self.x, Tensor)
        assert isinstance(self.y, Tensor)
        square = self.w.square()
        return nn.functional.softplus(-self.y * (self.x @ self.w)).mean() + self.weight * (square / (1 + square)).sum()


def nonconvex_logistic(*, samples: int = 200, size: int = 20, weight: float = 0.1, seed: int = 0) -> SmoothProblem:
    """f(w) = mean log(1 + exp(-y x·w)) + weight * sum w² / (1 + w²): smooth, not convex, gradient bounded.

    L <= ||X||² / (4 samples) + 2 weight and G <= mean ||x|| + weight * sqrt(size) * 3 sqrt(3) / 8 everywhere.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, size, generator=generator, dtype=torch.float64)
    truth = torch.randn(size, generator=generator, dtype=torch.float64)
    y = torch.sign(x @ truth + torch.randn(samples, generator=generator, dtype=torch.float64))
    start = 2 * torch.randn(size, generator=generator, dtype=torch.float64)

    def make() -> nn.Module:
        model = _Logistic(x, y, weight)
        with torch.no_grad():
            model.w.copy_(start)
        return model

    smooth = float(torch.linalg.matrix_norm(x, 2)) ** 2 / (4 * samples) + 2 * weight
    gradient = float(x.norm(dim=1).mean()) + weight * math.sqrt(size) * 3 * math.sqrt(3) / 8
    return SmoothProblem(make, "logistic loss with the non-convex regularizer w² / (1 + w²)", smooth, gradient)


def tanh_network(*, samples: int = 64, hidden: int = 5, seed: int = 0) -> SmoothProblem:
    """Squared error of a small tanh network on noisy targets: smooth; L and G are known only along the runs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    y = torch.sin(x.sum(1, keepdim=True)) + 0.1 * torch.randn(samples, 1, generator=generator, dtype=torch.float64)
    shapes = {"first": (hidden, 3), "bias": (hidden,), "second": (1, hidden)}
    start = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in start.items():
                self.register_parameter(name, nn.Parameter(value.clone()))

        def forward(self) -> Tensor:
            inner = torch.tanh(nn.functional.linear(x, self.first, self.bias))  # type: ignore[arg-type]
            return (nn.functional.linear(inner, self.second) - y).square().mean()  # type: ignore[arg-type]

    return SmoothProblem(Network, f"squared error of a tanh network with {hidden} hidden units")
