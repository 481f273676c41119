"""Helpers for DistributedDataParallel: unwrapping the model, and synchronizing the ascent gradient."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

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


def running_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Returns the DistributedDataParallel whose forward is running, if it contains the model."""
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    holds = active is not None and any(module is model for module in active.modules())
    return active if holds else None


def is_first_of_static_graph(ddp: DistributedDataParallel) -> bool:
    """Whether its next backward records the static graph, and so must be complete and synchronized."""
    return bool(ddp.static_graph) and not getattr(ddp, "_static_graph_delay_allreduce_enqueued", True)


def invalidates_graphs(ddp: DistributedDataParallel) -> bool:
    """Whether its forward raises the versions of buffers, so that a graph that saved them can no longer be used."""
    return torch.__version__ < "2.11" and bool(ddp.broadcast_buffers) and any(True for _ in ddp.module.buffers())


def unsynchronized(ddp: DistributedDataParallel | None) -> AbstractContextManager[None]:
    """Within the block, gradients are not synchronized."""
    return nullcontext() if ddp is None else ddp.no_sync()


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
