"""Diagonal Fisher information of sharded parameters: one forward and backward for each sample.

All ranks run the same sample, so that what FSDP2 averages is that sample's gradient; each squares the part that it
holds. Modes, buffers, gradients and random states are as before afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from sparsesam.distributed.shards import Shards, local_part
from sparsesam.masks.batches import batch_size, slice_batch, to_device
from sparsesam.masks.checks import NonFiniteScoreError
from sparsesam.masks.fisher import FisherDiagonal
from sparsesam.masks.fisher_problem import Problem
from sparsesam.masks.preserve_model_state import preserve_model_state


def sharded_fisher(
    model: nn.Module, batches: Iterable[Any], problem: Problem, parameters: Mapping[str, Tensor], shards: Shards
) -> FisherDiagonal:
    """1/N sum_i (grad_w loss(w; x_i, y_i))², this rank's part of it; ``batches`` must be the same on all ranks."""
    sums = {
        name: torch.zeros_like(part, dtype=torch.promote_types(part.dtype, torch.float32))
        for name, part in ((name, local_part(parameter)) for name, parameter in parameters.items())
    }
    samples = 0
    with ExitStack() as stack:
        # FSDP2 does not support changing requires_grad after wrapping.
        stack.enter_context(preserve_model_state(model, freeze=False))
        for parameter in model.parameters():
            stack.callback(setattr, parameter, "grad", parameter.grad)
        for batch in batches:
            size = batch_size(problem.inputs(batch))
            for i in range(size):
                sample = to_device(slice_batch(batch, slice(i, i + 1), size), shards.mesh.device_type)
                _add_sample(model, sample, problem, parameters, sums)
            samples += size
    if samples == 0:
        raise ValueError("batches is empty; at least one sample is needed")
    values = {name: total / samples for name, total in sums.items()}
    bad = [name for name, value in values.items() if not bool(torch.isfinite(value).all())]
    if shards.sum_of(len(bad))[0]:
        raise NonFiniteScoreError(
            f"the Fisher information {f'of {bad[0]!r} ' if bad else 'on another rank '}is not finite; the loss or its "
            "gradient overflows at the current weights (lower the learning rate or rho, or measure in float32)"
        )
    return FisherDiagonal(values, dict.fromkeys(values, "sample by sample: sharded"), samples)


def gathered_batches(batch: Any, shards: Shards) -> list[Any]:
    """The batches of all ranks that train on different data; each of them moves what it gets to its own device."""
    batches = [batch]
    for dim in range(shards.mesh.ndim):
        group = shards.mesh.get_group(dim)
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, to_device(batches, "cpu"), group=group)
        batches = [one for part in found for one in part]
    return batches


def _add_sample(
    model: nn.Module, sample: Any, problem: Problem, parameters: Mapping[str, Tensor], sums: dict[str, Tensor]
) -> None:
    model.zero_grad()
    problem.sample_loss(model, sample, draw=True).backward()
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            gradient = local_part(parameter.grad, parameter).to(sums[name].dtype)
            sums[name].addcmul_(gradient, gradient)
