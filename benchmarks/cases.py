"""A step of an optimizer on its own copy of a model; shared by the benchmarks of steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sparsesam
from benchmarks.dispatch import LiveBytes

SGD: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-3}
Batch = tuple[Tensor, Tensor]
#: Wraps a base optimizer and its model.
Wrap = Callable[[Any, nn.Module], Any]


class Case:
    """A copy of a model, prepared (compiled, moved), and its optimizer; calling it takes a step.

    ``precision`` is the autocast dtype of the forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        wrap: Wrap | None = None,
        *,
        prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
        base: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        settings: dict[str, Any] = SGD,
        precision: torch.dtype | None = None,
    ) -> None:
        self.model, self.batch, self.precision = prepare(copy.deepcopy(model)), batch, precision
        self.base = base(self.model.parameters(), **settings)
        self.optimizer: Any = self.base if wrap is None else wrap(self.base, self.model)

    def __call__(self) -> Any:
        if isinstance(self.optimizer, sparsesam.SharpnessAware):
            return self.optimizer.minimize(self.loss, batch=self.batch)
        if hasattr(self.optimizer, "first_step"):  # pytorch-optimizer needs the first gradient before the step
            self.closure()
        return self.optimizer.step(self.closure)

    def loss(self, batch: Batch) -> Tensor:
        with torch.autocast(batch[0].device.type, self.precision, enabled=self.precision is not None):
            scores = self.model(batch[0])
        return cross_entropy(scores.float(), batch[1])

    def backward(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        return loss

    def closure(self) -> Tensor:
        return self.backward(self.batch)

    @property
    def perturbed(self) -> float:
        """Returns the share of perturbed weights."""
        if hasattr(self.optimizer, "first_step"):
            return 1.0
        sparsity = getattr(self.optimizer, "sparsity", 1.0)
        return 1 - (1.0 if sparsity is None else sparsity)

    def peak_bytes(self, *, refresh: bool = False) -> int:
        """Returns the peak of live bytes of a step, beyond model and batch; with ``refresh``, with a mask refresh."""
        with LiveBytes([*self.model.parameters(), *self.model.buffers(), *self.batch]) as live:
            self()  # creates the momentum and the first mask
            if refresh and self.optimizer.mask is not None:
                self.optimizer.refresh_mask()
            live.restart()
            self()
        return int(live.peak)


class ClosureCase(Case):
    """A step with a closure that calls backward() itself."""

    def __call__(self) -> Any:
        return self.optimizer.step(self.closure)


def cifar_batch(count: int, side: int = 32) -> Batch:
    return torch.randn(count, 3, side, side), torch.randint(10, (count,))


def sam(base: Any, model: nn.Module) -> sparsesam.SAM:
    return sparsesam.SAM(base, model, rho=0.1)


def ssam(mask: sparsesam.MaskRule, **options: Any) -> Wrap:
    options = {"norm": "masked", **options}
    return lambda base, model: sparsesam.SSAM(base, model, rho=0.1, mask=mask, **options)


def pytorch_optimizer_sam(base: Any, model: nn.Module) -> Any:
    from pytorch_optimizer import SAM

    return SAM(model.parameters(), torch.optim.SGD, rho=0.1, **SGD)
