"""Helpers for DistributedDataParallel: unwrapping the model, and synchronizing the ascent gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the user's module inside DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def needs_every_gradient(ddp: DistributedDataParallel) -> bool:
    """Whether a backward that leaves out gradients would disturb the synchronization of the ranks."""
    return bool(ddp.static_graph) or bool(ddp._comm_hooks)


def refuse_join(ddp: DistributedDataParallel) -> None:
    """Raise within torch's Join, where ranks without inputs would not take part in our collectives."""
    if ddp._join_config.enable:
        raise RuntimeError(
            "Join is not supported: ranks without inputs would not take part in the optimizer's own communication; "
            "give all ranks the same number of batches (DistributedSampler(drop_last=True))"
        )


def average_gradients(ddp: DistributedDataParallel, parameters: Sequence[Tensor]) -> None:
    """Average the gradients of these parameters over the ranks.

    The gradient of a parameter that a rank did not use counts as zero, as with ``find_unused_parameters=True``.
    """
    group = ddp.process_group
    size = dist.get_world_size(group)
    may_differ = ddp.find_unused_parameters or ddp.static_graph
    works = []
    for parameter in parameters:
        if parameter.grad is None and may_differ:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            works.append((dist.all_reduce(parameter.grad, group=group, async_op=True), parameter.grad))
    for work, gradient in works:
        work.wait()
        gradient.div_(size)
