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
        for name, buffer in module._buffers.items()  # as named_buffers() does, which is slow for every step
        if buffer is not None and name in _STATISTICS
    ]


def versions(model: nn.Module) -> list[int]:
    """Changes whenever a running statistic is written to."""
    return [buffer._version for buffer in statistics_of(model.modules())]


class StatisticsSnapshot:
    """The running statistics of a model, to be put back later."""

    def __init__(self, model: nn.Module) -> None:
        # Of one device and dtype each, so that an accelerator copies them by one launch.
        self._buffers: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for buffer in statistics_of(model.modules()):
            self._buffers.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        self._values = {key: [torch.empty_like(one) for one in buffers] for key, buffers in self._buffers.items()}
        for key, buffers in self._buffers.items():
            torch._foreach_copy_(self._values[key], buffers)

    @torch.no_grad()
    def restore(self) -> None:
        for key, buffers in self._buffers.items():
            torch._foreach_copy_(buffers, self._values[key])
