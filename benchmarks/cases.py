"""A step of an optimizer on its own copy of a model, shared by the benchmarks of steps."""

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
    """A copy of a model, prepared (compiled, moved), and its optimizer; calling it takes ``steps`` steps.

    ``precision`` is the autocast dtype of the forward pass. Steps are taken by ``minimize``, or with ``closure`` by
    ``step`` and a closure that calls ``backward()``.
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
        steps: int = 1,
        closure: bool = False,
    ) -> None:
        self.model, self.batch, self.precision = prepare(copy.deepcopy(model)), batch, precision
        self.base = base(self.model.parameters(), **settings)
        self.optimizer: Any = self.base if wrap is None else wrap(self.base, self.model)
        self.steps, self.minimizes = steps, isinstance(self.optimizer, sparsesam.SharpnessAware) and not closure
        self.images = self.steps_taken = 0

    def __call__(self) -> None:
        for _ in range(self.steps):
            self.step()
            self.steps_taken += 1

    def step(self) -> None:
        if self.minimizes:
            self.optimizer.minimize(self.loss, batch=self.batch)
        else:
            self.optimizer.step(self.closure)

    def loss(self, batch: Batch) -> Tensor:
        with torch.autocast(batch[0].device.type, self.precision, enabled=self.precision is not None):
            scores = self.model(batch[0])
        return self.criterion(scores.float(), batch[1])

    def criterion(self, scores: Tensor, labels: Tensor) -> Tensor:
        self.images += len(labels)
        return cross_entropy(scores, labels)

    def closure(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.batch)
        loss.backward()
        return loss

    @property
    def passes(self) -> float:
        """Returns the passes over the batch in a step, of the steps taken so far."""
        return self.images / len(self.batch[1]) / self.steps_taken

    @property
    def perturbed(self) -> float:
        """Returns the share of perturbed weights."""
        if not isinstance(self.optimizer, sparsesam.SharpnessAware):
            return float(self.optimizer is not self.base)
        return 1 - (self.optimizer.sparsity or 0.0)

    def peak_bytes(self, *, refresh: bool = False) -> int:
        """Returns the peak of live bytes of a step, beyond model and batch; with ``refresh``, with a mask refresh."""
        with LiveBytes([*self.model.parameters(), *self.model.buffers(), *self.batch]) as live:
            self()  # creates the momentum and the first mask
            if refresh and self.optimizer.mask is not None:
                self.optimizer.refresh_mask()
            live.restart()
            self()
        return int(live.peak)


class OtherCase(Case):
    """A step of a class of pytorch-optimizer, which makes its base optimizer itself.

    LookSAM's second pass is left out in the steps that do not use it, unlike in its documentation.
    """

    def __init__(self, model: nn.Module, batch: Batch, name: str, **options: Any) -> None:
        super().__init__(model, batch, steps=options.get("k", 1))
        import pytorch_optimizer
        from pytorch_optimizer.lr_scheduler import ProportionScheduler

        self.kind, make = name, getattr(pytorch_optimizer, name)
        if name == "GSAM":  # its batch is given beforehand
            constant = torch.optim.lr_scheduler.ConstantLR(self.base, 1.0)
            rho = ProportionScheduler(constant, max_lr=1.0, max_value=0.05, min_value=0.05)
            self.optimizer = make(self.model.parameters(), self.base, self.model, rho)
            self.optimizer.set_closure(self.criterion, *batch)
        else:
            first = (self.model,) if name == "WSAM" else ()
            arguments = (*first, self.model.parameters(), torch.optim.SGD)
            self.optimizer = make(*arguments, rho=0.05, **options, **SGD)

    def step(self) -> None:
        if self.kind == "GSAM":
            self.optimizer.step()
        elif self.kind == "WSAM":
            self.optimizer.step(self.closure)
        else:
            self.closure()
            if self.kind != "LookSAM" or self.steps_taken % self.optimizer.k == 0:
                self.optimizer.step(self.closure)
            else:
                self.optimizer.second_step()


def cifar_batch(count: int, side: int = 32) -> Batch:
    return torch.randn(count, 3, side, side), torch.randint(10, (count,))


def sam(base: Any, model: nn.Module) -> sparsesam.SAM:
    return sparsesam.SAM(base, model, rho=0.1)


def ssam(mask: sparsesam.MaskRule, **options: Any) -> Wrap:
    options = {"norm": "masked", **options}
    return lambda base, model: sparsesam.SSAM(base, model, rho=0.1, mask=mask, **options)
