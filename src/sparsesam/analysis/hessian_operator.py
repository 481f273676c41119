"""Hessian-vector products.

The matrix is never formed. A product is one double backward over the objective's batches,

    H v = sum_b share_b * grad_w <grad_w loss_b, v>.

Measured (python -m benchmarks hessian --resnet18): a product takes 0.3 (1,210 weights) to 0.9 (ResNet-18) of
curvlinops' time, with keep_graph 0.15 to 0.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from sparsesam.analysis.objective import Objective, ParameterFilter, select_parameters
from sparsesam.utils.graph import leaf_of, nodes_of

_KINKED = "Relu Threshold MaxPool Hardtanh Abs Hardswish Hardsigmoid Clamp L1Loss AdaptiveMax".lower().split()


class HessianOperator:
    """The Hessian of an objective with respect to some of its model's parameters, as a linear operator.

    ``products`` counts the Hessian-vector products, and ``on_product`` is called after each. Parameters that the loss
    does not depend on have rows and columns of zeros; frozen ones are left out unless a filter names them.
    ``keep_graph=True`` keeps the graph of every batch's first backward for the next product: about half the cost for
    several times the memory.

        with hessian.measuring():
            hv = hessian @ v
    """

    def __init__(
        self,
        objective: Objective,
        *,
        parameters: ParameterFilter = None,
        keep_graph: bool = False,
        on_product: Callable[[], None] = lambda: None,
    ) -> None:
        self.objective = objective
        self.parameters = select_parameters(objective.model, parameters)
        self.tensors: list[Tensor] = list(self.parameters.values())
        self.size = sum(tensor.numel() for tensor in self.tensors)
        self.dtype = torch.promote_types(self.tensors[0].dtype, torch.float32)
        self.device = self.tensors[0].device
        self.products, self.on_product = 0, on_product
        self.keep_graph = keep_graph
        self.notes: list[str] = []
        self._graphs: dict[int, Sequence[Tensor]] = {}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Prepare the model for measuring; products are possible only inside this context."""
        with self.objective.measuring(self.tensors):
            if not self.notes:
                self.notes = self._find_notes()
            try:
                yield
            finally:
                self._graphs.clear()

    def __matmul__(self, vector: Tensor) -> Tensor:
        """Returns H v for a flat vector, in the operator's own dtype."""
        if vector.shape != (self.size,):
            raise ValueError(f"a vector must have shape ({self.size},), got {tuple(vector.shape)}")
        parts = self.split(vector.detach())
        total = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for index, share in enumerate(self.objective.weights):
            total.add_(self._product(index, parts), alpha=share)
        self.products += 1
        self.on_product()
        if not bool(total.isfinite().all()):
            raise ValueError(
                "a Hessian-vector product is not finite: the loss or its derivatives overflow at these weights "
                "(a square root or a norm at 0 is the usual cause)"
            )
        return total

    def split(self, vector: Tensor) -> list[Tensor]:
        """Split a flat vector into tensors of the parameters' shapes and dtypes."""
        parts = vector.split([tensor.numel() for tensor in self.tensors])
        return [part.view(tensor.shape).to(tensor) for part, tensor in zip(parts, self.tensors, strict=True)]

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Returns a flat vector as a direction, {name: tensor}."""
        return dict(zip(self.parameters, self.split(vector), strict=True))

    def random_normal(self, generator: torch.Generator) -> Tensor:
        """Draws on the CPU, so that every device gets the same numbers; so does `random_signs`."""
        return torch.randn(self.size, generator=generator, dtype=torch.float64).to(self.device)

    def random_signs(self, generator: torch.Generator) -> Tensor:
        return (torch.randint(0, 2, (self.size,), generator=generator).double() * 2 - 1).to(self.device)

    def _product(self, index: int, vector: Sequence[Tensor]) -> Tensor:
        gradient: Sequence[Tensor] | None = self._graphs.get(index)
        if gradient is None:
            loss, gradient = self.objective.batch_loss(index), ()
            if loss.requires_grad:
                gradient = torch.autograd.grad(loss, self.tensors, create_graph=True, materialize_grads=True)
        if self.keep_graph:
            self._graphs[index] = gradient
        pairs = [(g, v) for g, v in zip(gradient, vector, strict=False) if g.requires_grad]
        if not pairs:
            return torch.zeros(self.size, dtype=self.dtype, device=self.device)
        gradient, vector = zip(*pairs, strict=True)
        product = torch.autograd.grad(
            gradient, self.tensors, vector, retain_graph=self.keep_graph, materialize_grads=True
        )
        return torch.cat([part.to_dense().reshape(-1).to(self.dtype) for part in product])

    def _find_notes(self) -> list[str]:
        """Returns notes on parameters that the loss does not depend on and on non-smooth operations."""
        nodes = list(nodes_of([self.objective.batch_loss(0).grad_fn]))
        used = {id(leaf_of(node)) for node in nodes}
        unused = [name for name, tensor in self.parameters.items() if id(tensor) not in used]
        notes = [f"the loss does not depend on {', '.join(unused)}: zero rows"] if unused else []
        names = {node.name().removesuffix("0").removesuffix("Backward") for node in nodes}
        kinks = sorted(name for name in names if any(kinked in name.lower() for kinked in _KINKED))
        if kinks:
            notes.append(
                f"not smooth ({', '.join(kinks)}): the Hessian is that of the smooth piece at these weights, "
                "without the kinks between pieces"
            )
        return notes
