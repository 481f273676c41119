"""Products of the Hessian of a loss with vectors.

The matrix is never formed. A product is one double backward over the objective's batches,

    H v = sum_b share_b * grad_w <grad_w loss_b, v>.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from sparsesam.analysis.objective import Objective, ParameterFilter, select_parameters

_KINKED = "Relu Threshold MaxPool Hardtanh Abs Hardswish Hardsigmoid Clamp L1Loss AdaptiveMax".lower().split()


class HessianOperator:
    """The Hessian of an objective with respect to some of its model's parameters, as products with vectors.

    ``products`` counts them. Parameters that the loss does not depend on have rows and columns of zeros; frozen
    ones are left out unless a filter names them. ``keep_graph=True`` keeps every batch's first backward for the
    next product: about half the cost for several times the memory.

        with hessian.measuring():
            hv = hessian @ v
    """

    def __init__(self, objective: Objective, *, parameters: ParameterFilter = None, keep_graph: bool = False) -> None:
        self.objective = objective
        self.parameters = select_parameters(objective.model, parameters)
        self.tensors: list[Tensor] = list(self.parameters.values())
        self.size = sum(tensor.numel() for tensor in self.tensors)
        self.products = 0
        self.keep_graph = keep_graph
        self.notes: list[str] = []
        self._graphs: dict[int, list[Tensor | None]] = {}

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.tensors[0].dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Put the model into the mode of measurement; products are possible only inside."""
        with self.objective.measuring(self.tensors):
            if not self.notes:
                self.notes = self._find_notes()
            try:
                yield
            finally:
                self._graphs.clear()

    def __matmul__(self, vector: Tensor) -> Tensor:
        """H v for a flat vector; the result has the products' own dtype."""
        if vector.shape != (self.size,):
            raise ValueError(f"a vector must have shape ({self.size},), got {tuple(vector.shape)}")
        parts = self.split(vector.detach())
        total = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for index, share in enumerate(self.objective.weights):
            total.add_(self._product(index, parts), alpha=share)
        self.products += 1
        if not bool(total.isfinite().all()):
            raise ValueError(
                "a Hessian-vector product is not finite: the loss or its derivatives overflow at these weights "
                "(a square root or a norm at 0 is the usual cause)"
            )
        return total

    def split(self, vector: Tensor) -> list[Tensor]:
        """A flat vector as tensors of the parameters' shapes and dtypes."""
        parts = vector.split([tensor.numel() for tensor in self.tensors])
        return [part.view(tensor.shape).to(tensor) for part, tensor in zip(parts, self.tensors, strict=True)]

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """A flat vector as a direction, {name: tensor}."""
        return dict(zip(self.parameters, self.split(vector), strict=True))

    def random_vector(self, generator: torch.Generator, kind: Literal["normal", "signs"]) -> Tensor:
        """Drawn on the CPU, so that every device gets the same."""
        if kind == "normal":
            vector = torch.randn(self.size, generator=generator, dtype=torch.float64)
        else:
            vector = torch.randint(0, 2, (self.size,), generator=generator).double() * 2 - 1
        return vector.to(self.device)

    def _gradient(self, index: int) -> list[Tensor | None]:
        if index in self._graphs:
            return self._graphs[index]
        loss = self.objective.batch_loss(index)
        if not loss.requires_grad:
            return [None] * len(self.tensors)
        gradient: list[Tensor | None] = list(
            torch.autograd.grad(loss, self.tensors, create_graph=True, allow_unused=True)
        )
        if self.keep_graph:
            self._graphs[index] = gradient
        return gradient

    def _product(self, index: int, parts: Sequence[Tensor]) -> Tensor:
        gradient = self._gradient(index)
        pairs = [(g, v) for g, v in zip(gradient, parts, strict=True) if g is not None and g.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(self.tensors)
        if pairs:
            ends, starts = zip(*pairs, strict=True)
            found = torch.autograd.grad(ends, self.tensors, starts, retain_graph=self.keep_graph, allow_unused=True)
        zeros = (
            torch.zeros_like(tensor) if part is None else part for part, tensor in zip(found, self.tensors, strict=True)
        )
        return torch.cat([(part.to_dense() if part.is_sparse else part).reshape(-1).to(self.dtype) for part in zeros])

    def _find_notes(self) -> list[str]:
        """Notes on parameters that the loss does not depend on, and on operations that are not smooth."""
        loss = self.objective.batch_loss(0)
        gradient = (
            torch.autograd.grad(loss, self.tensors, allow_unused=True, retain_graph=True)
            if loss.requires_grad
            else [None] * len(self.tensors)
        )
        unused = [name for name, part in zip(self.parameters, gradient, strict=True) if part is None]
        notes = []
        if unused:
            notes.append(f"the loss does not depend on {', '.join(unused)}: zero rows")
        kinks = sorted(_kinks(loss))
        if kinks:
            notes.append(
                f"not smooth ({', '.join(kinks)}): the Hessian is that of the smooth piece at these weights, "
                "without the kinks between pieces"
            )
        return notes


def _kinks(loss: Tensor) -> set[str]:
    """Names of the loss's operations whose derivative jumps, found in its graph."""
    found: set[str] = set()
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name().removesuffix("0").removesuffix("Backward")
        if any(kinked in name.lower() for kinked in _KINKED):
            found.add(name)
        waiting.extend(parent for parent, _ in node.next_functions)
    return found
