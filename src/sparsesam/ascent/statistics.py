"""What a forward writes to: normalization statistics move once per step, what the second pass does is taken back."""

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


def statistics_versions(model: nn.Module) -> list[int]:
    """Changes whenever a running statistic is written to."""
    return [buffer._version for buffer in statistics_of(model.modules())]


class Snapshot:
    """Values of tensors, to be put back later."""

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # Of one device and dtype each, so that an accelerator copies them by one launch.
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
