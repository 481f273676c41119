"""Running statistics are updated once per step; updates by the second pass are undone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def statistics_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Returns the running statistics of layers in training mode.

    Layers are recognized by the names of their buffers, so that custom normalization layers are included.
    """
    return [
        buffer
        for module in modules
        if getattr(module, "training", False)  # frozen ScriptModules lack this attribute
        for name, buffer in module._buffers.items()  # as named_buffers() does, which is slow for every step
        if buffer is not None and name in _STATISTICS
    ]


def statistics_versions(model: nn.Module) -> list[int]:
    """Returns version counters that change whenever a running statistic is written to."""
    return [buffer._version for buffer in statistics_of(model.modules())]


class Snapshot:
    """Copies of tensors, to be restored later."""

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # Grouped by device and dtype, so that an accelerator copies each group in one launch.
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for one in tensors:
            groups.setdefault((one.device, one.dtype), []).append(one)
        self._saved = [(group, [torch.empty_like(one) for one in group]) for group in groups.values()]
        for group, values in self._saved:
            torch._foreach_copy_(values, group)

    @torch.no_grad()
    def restore(self) -> None:
        for group, values in self._saved:
            torch._foreach_copy_(group, values)
