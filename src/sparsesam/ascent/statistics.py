"""Normalization statistics move once per step: what the second pass adds to them is taken back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def statistics_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Running statistics of those layers that are in training mode.

    A layer is recognised by its buffers' names, so that a user's own normalization is covered too.
    """
    return [
        buffer
        for module in modules
        if getattr(module, "training", False)  # frozen scripts have no such attribute
        for name, buffer in module.named_buffers(recurse=False)
        if name in _STATISTICS
    ]


def versions(model: nn.Module) -> list[int]:
    """Changes whenever a running statistic is written to."""
    return [buffer._version for buffer in statistics_of(model.modules())]


class StatisticsSnapshot:
    """The running statistics of a model, to be put back later."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = statistics_of(model.modules())
        self._values = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def restore(self) -> None:
        for buffer, value in zip(self._buffers, self._values, strict=True):
            buffer.copy_(value)
