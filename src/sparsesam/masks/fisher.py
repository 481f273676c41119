"""Diagonal empirical Fisher information, exactly one gradient per sample.

    F = 1/N sum_i (grad_w loss(w; x_i, y_i))^2

Samples go through the model one after the other: exact for every model, with the memory of one sample. Two ways of
measuring several at a time were tried on a CPU (docs/figures.md). Rules that make per-sample gradients of a layer's
input and output gradient are 1.3 times faster for ResNet-18, slower for torch's transformer layers and 600 lines long;
``torch.func.vmap`` is twice as fast for small networks and several times slower above a million weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparsesam.distributed.shards import Shards, local_part
from sparsesam.masks.batches import batch_size, slice_batch, to_device
from sparsesam.masks.checks import NonFiniteScoreError
from sparsesam.masks.preserve_model_state import preserve_model_state
from sparsesam.masks.sample_loss import LossFn, ModelLoss, SampleLabels, sample_loss_of


@dataclass(frozen=True)
class FisherDiagonal:
    """Mean squared per-sample gradients, and the number of samples.

    ``values``: float32 (float64 for float64 parameters), zeros for a parameter the loss does not depend on.
    """

    values: dict[str, Tensor]
    samples: int


def fisher_diagonal(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn | None = None,
    *,
    model_loss: ModelLoss | None = None,
    parameters: Mapping[str, Tensor] | None = None,
    labels: Literal["data", "sampled"] = "data",
    sample_labels: SampleLabels | None = None,
    generator: torch.Generator | None = None,
) -> FisherDiagonal:
    """Computes the diagonal of the Fisher information over the samples of ``batches``, one gradient per sample.

    The model runs in evaluation mode with frozen statistics and is left as it was found.

    Args:
        model: any module.
        batches: pairs (inputs, targets), inputs being a tensor, a tuple of positional or a dictionary of keyword
            arguments of the model; with ``model_loss``, anything that can be sliced.
        loss_fn: ``loss_fn(output, target)``. Sample i's loss is ``loss_fn(model(x[i:i+1]), y[i:i+1])``, so the
            reduction over a batch does not matter.
        model_loss: ``model_loss(model, batch)`` in place of ``loss_fn``.
        parameters: those to measure, by name. Default: all that require a gradient.
        labels: ``"data"``, or ``"sampled"`` from softmax(output) over dimension 1 (the true Fisher information).
        sample_labels: ``sample_labels(output, generator)`` in place of that draw.
        generator: of the draw.

    Examples:
        >>> diagonal = sparsesam.fisher_diagonal(model, loader, loss_fn)
        >>> diagonal.values["0.weight"].shape == model[0].weight.shape
        True
    """
    loss = sample_loss_of(loss_fn, model_loss, labels, sample_labels, generator)
    return mean_squared_gradients(model, batches, loss, _wanted_parameters(model, parameters), None)


def _wanted_parameters(model: nn.Module, names: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    available: dict[str, Tensor] = dict(model.named_parameters())
    if names is None:
        wanted = {name: parameter for name, parameter in available.items() if parameter.requires_grad}
    else:
        unknown = [name for name in names if name not in available]
        if unknown:
            raise ValueError(f"parameters holds {unknown[0]!r}, which model.named_parameters() does not")
        wanted = {name: available[name] for name in names}
    if not wanted:
        raise ValueError("there is no parameter to measure; none is named or none requires a gradient")
    return wanted


def mean_squared_gradients(
    model: nn.Module,
    batches: Iterable[Any],
    loss: ModelLoss,
    parameters: Mapping[str, Tensor],
    shards: Shards | None,
) -> FisherDiagonal:
    """1/N sum_i (grad_w loss(model, sample_i))², with ``shards`` this rank's part of it.

    Ranks that share parameters must have the same batches: what FSDP2 averages is then one sample's gradient.
    """
    gradients = _gradients if shards is None else _sharded_gradients
    device = next(iter(parameters.values())).device if shards is None else shards.mesh.device_type
    samples = 0
    with ExitStack() as stack:
        # FSDP2 does not support changing requires_grad after wrapping.
        stack.enter_context(preserve_model_state(model, freeze=shards is None))
        if shards is None:
            for parameter in parameters.values():
                parameter.requires_grad_(True)
        else:
            for parameter in model.parameters():
                stack.callback(setattr, parameter, "grad", parameter.grad)
        sums = {name: torch.zeros_like(local_part(p), dtype=_sum_dtype(p)) for name, p in parameters.items()}
        for batch in batches:
            batch = to_device(batch, device)
            size = batch_size(batch)
            samples += size
            for i in range(size):
                value = loss(model, slice_batch(batch, slice(i, i + 1), size))
                for total, gradient in zip(sums.values(), gradients(model, value, parameters), strict=True):
                    if gradient is not None:
                        _add_square(gradient, total)
    if samples == 0:
        raise ValueError("batches is empty; at least one sample is needed")
    values = {name: total / samples for name, total in sums.items()}
    _require_finite(values, shards)
    return FisherDiagonal(values, samples)


def _gradients(model: nn.Module, loss: Tensor, parameters: Mapping[str, Tensor]) -> Iterable[Tensor | None]:
    if not loss.requires_grad:
        return [None] * len(parameters)
    return torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)


def _sharded_gradients(model: nn.Module, loss: Tensor, parameters: Mapping[str, Tensor]) -> Iterable[Tensor | None]:
    """FSDP2 reduces gradients in backward() alone."""
    model.zero_grad()
    loss.backward()
    return [None if p.grad is None else local_part(p.grad, p) for p in parameters.values()]


def _add_square(gradient: Tensor, total: Tensor) -> None:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    real = (dense.abs() if dense.is_complex() else dense).to(total.dtype)
    total.addcmul_(real, real)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else torch.float32


def _require_finite(values: Mapping[str, Tensor], shards: Shards | None) -> None:
    """Raise on all ranks that share parameters, if the values of one are not finite."""
    bad = [name for name, value in values.items() if not bool(torch.isfinite(value).all())]
    if bad if shards is None else shards.sum_of(len(bad))[0]:
        raise NonFiniteScoreError(
            f"the Fisher information of {repr(bad[0]) if bad else 'another rank'} is not finite; the loss or its "
            "gradient overflows at the current weights (lower the learning rate or rho, or measure in float32)"
        )
