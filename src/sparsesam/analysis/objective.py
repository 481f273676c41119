"""The objective that every analysis measures: a model, its loss, and a fixed list of batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from sparsesam.analysis.results import ObjectiveSummary
from sparsesam.distributed.ddp import unwrap
from sparsesam.masks.fisher import LossFn, ModelLoss, Problem
from sparsesam.masks.fixed import NORMALIZATION, is_layer_of
from sparsesam.utils.batches import batch_size, to_device
from sparsesam.utils.checks import check_bool, check_choice, check_like_parameters
from sparsesam.utils.restore import Snapshot, preserve_model_state

Statistics = Literal["frozen", "recomputed", "batch"]
ParameterFilter = Iterable[str] | str | None


class Objective:
    """The loss of a model over fixed batches of n_b samples, as a function of the model's current weights:

        f(w) = sum_b n_b * loss(w; batch_b) / sum_b n_b

    Give ``loss_fn(output, target)`` for batches (inputs, targets), where inputs are a tensor, a tuple of positional or
    a dictionary of keyword arguments; or ``model_loss(model, batch)`` for batches of any structure.

    The model is measured in evaluation mode and restored afterwards. ``statistics`` of normalization layers: "frozen"
    uses the running statistics; "recomputed" averages them over the batches at each point, at twice the cost; "batch"
    uses each batch's own, as in training.

    A loss that differs between two evaluations is rejected. ``allow_random=True`` accepts it and uses the same random
    numbers in every evaluation, so it measures a single draw of the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        loss_fn: LossFn | None = None,
        *,
        model_loss: ModelLoss | None = None,
        statistics: Statistics = "frozen",
        allow_random: bool = False,
    ) -> None:
        check_choice("statistics", statistics, get_args(Statistics))
        is_pair = isinstance(batches, tuple) and all(isinstance(part, Tensor) for part in batches)
        if is_pair or isinstance(batches, (Tensor, Mapping)):
            raise TypeError(f"batches must be a list of batches, got one {type(batches).__name__}; write [batch]")
        self.model = unwrap(model)
        self.problem = Problem(loss_fn, model_loss)
        self.batches = list(batches)
        self.statistics: Statistics = statistics
        self.allow_random = allow_random
        inputs = [self.problem.inputs(batch) for batch in self.batches]
        sizes = [batch_size(dict(part) if isinstance(part, Mapping) else part) for part in inputs]
        if not sizes or 0 in sizes:
            raise ValueError(f"batches is empty or holds an empty batch, got batches of {sizes} samples")
        self.samples = sum(sizes)
        self.weights = [size / self.samples for size in sizes]
        self._device = next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def summary(self) -> ObjectiveSummary:
        """Returns the data and options that results are measured with."""
        random_loss = "one draw, the same at every point" if self.allow_random else "rejected"
        return ObjectiveSummary(len(self.batches), self.samples, self.statistics, random_loss)

    def measured(self, *notes: str) -> dict[str, Any]:
        """Returns the fields of a `Measurement`."""
        return {"measured_on": self.summary(), "notes": list(notes)}

    def batch_loss(self, index: int) -> Tensor:
        """Returns the differentiable loss of one batch; call inside `measuring`."""
        if self.allow_random:
            torch.manual_seed(index)  # each batch has its own draw, the same at every evaluation
        return self.problem.sample_loss(self.model, to_device(self.batches[index], self._device))

    @torch.no_grad()
    def loss(self) -> float:
        """Returns the loss f at the current weights, possibly infinite or NaN; call inside `measuring`."""
        self.recompute_statistics()
        return sum(weight * float(self.batch_loss(index)) for index, weight in enumerate(self.weights))

    def gradient(self, parameters: Sequence[Tensor]) -> tuple[float, list[Tensor]]:
        """Returns the loss f and its gradient in the parameters' dtype, zeros for parameters it does not depend on."""
        self.recompute_statistics()
        total, sums = 0.0, [torch.zeros_like(p) for p in parameters]
        for index, weight in enumerate(self.weights):
            loss = self.batch_loss(index)
            total += weight * float(loss.detach())
            if loss.requires_grad:
                parts = torch.autograd.grad(loss, parameters, materialize_grads=True)
                for into, part in zip(sums, parts, strict=True):
                    into.add_(part.to_dense(), alpha=weight)
        return total, sums

    @torch.no_grad()
    def recompute_statistics(self) -> None:
        """With "recomputed" statistics, average them over the batches at the current weights."""
        if self.statistics != "recomputed":
            return
        # Only batch normalization can average its statistics over batches (momentum=None).
        layers = [m for m in self.model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
        momenta = [layer.momentum for layer in layers]
        try:
            for layer in layers:
                layer.reset_running_stats()
                layer.momentum, layer.training = None, True
            for index in range(len(self.batches)):
                self.batch_loss(index)
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum, layer.training = momentum, False

    @contextmanager
    def measuring(self, parameters: Iterable[Tensor] = ()) -> Iterator[None]:
        """Prepare the model for measuring, with gradients for ``parameters`` only; restore it on exit."""
        # Fused attention has no second derivative, and rounds differently without gradients.
        with sdpa_kernel(SDPBackend.MATH), preserve_model_state(self.model):
            if self.statistics == "batch":
                for module in self.model.modules():
                    module.training = module.training or is_layer_of(module, NORMALIZATION)
            for tensor in parameters:
                tensor.requires_grad_(True)
            self._check()
            yield

    def _check(self) -> None:
        """Raise ValueError if the loss of the first batch is not finite or not deterministic."""
        self.recompute_statistics()
        with torch.no_grad():
            first, again = float(self.batch_loss(0)), float(self.batch_loss(0))
        if not math.isfinite(first):
            raise ValueError(f"the loss of the first batch is {first}; it must be finite: check weights and inputs")
        # GPU reductions may differ in the last digits; dropout differs in the first ones.
        if not (self.allow_random or math.isclose(first, again, rel_tol=1e-5, abs_tol=1e-8)):
            raise ValueError(
                f"the loss is not deterministic: two evaluations of the first batch gave {first:.6g} and {again:.6g}; "
                "disable dropout and other noise, or pass allow_random=True (--allow-random) to measure one random draw"
            )


def select_parameters(model: nn.Module, parameters: ParameterFilter = None) -> dict[str, nn.Parameter]:
    """Returns the floating-point parameters to analyze, by name.

    None selects the trained ones (``requires_grad``); name patterns such as "layer4.*,fc.*" select among all, frozen
    ones included.
    """
    every = {name: p for name, p in unwrap(model).named_parameters() if p.is_floating_point()}
    if parameters is None:
        chosen = {name: p for name, p in every.items() if p.requires_grad}
    else:
        patterns = parameters.replace(" ", "").split(",") if isinstance(parameters, str) else list(parameters)
        chosen = {name: p for name, p in every.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}
    if not chosen:
        raise ValueError(
            f"parameters selects none of the model's {len(every)} floating-point parameters, "
            f"{', '.join(list(every)[:3])}, …; None selects those with requires_grad"
        )
    return chosen


def check_masks(masks: Mapping[str, Tensor] | None, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a bool mask for each parameter, on its device: all True without masks, else all False if it has none."""
    check_like_parameters("masks", masks or {}, parameters)
    check_bool("masks", masks or {})
    default = {name: torch.full_like(p, masks is None, dtype=torch.bool) for name, p in parameters.items()}
    return default | {name: mask.to(parameters[name].device) for name, mask in (masks or {}).items()}


@contextmanager
def moving(tensors: Sequence[Tensor]) -> Iterator[Callable[..., None]]:
    """Yield ``move((direction, distance), ...)``, which sets the tensors to original values + distance * direction.

    A direction has a tensor or None for each of them. On exit the tensors are restored bit for bit.
    """
    own = Snapshot(tensors)

    @torch.no_grad()
    def move(*steps: tuple[Sequence[Tensor | None], float]) -> None:
        own.restore()
        for direction, distance in steps:
            for tensor, along in zip(tensors, direction, strict=True):
                if along is not None:
                    tensor.add_(along, alpha=distance)

    try:
        yield move
    finally:
        own.restore()


def norm(tensors: Iterable[Tensor]) -> float:
    """Returns the Euclidean norm of all tensors together, in float64."""
    return math.sqrt(sum(float(tensor.detach().double().square().sum()) for tensor in tensors))
