"""Arguments of convolutions, as their backward kernels take them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F


def expand_arguments(
    input: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any
) -> tuple[Tensor, list[int], list[int], list[int]]:
    """Returns the input, with padding="same" added to it, and stride, padding and dilation of each dimension."""
    dimensions = weight.dim() - 2

    def each(option: Any) -> list[int]:
        return [option] * dimensions if isinstance(option, int) else list(option) * (dimensions // len(option))

    if padding == "same":  # if uneven, more at the end
        totals = [spread * (size - 1) for size, spread in zip(weight.shape[2:], each(dilation), strict=True)]
        input = F.pad(input, [side for total in reversed(totals) for side in (total // 2, total - total // 2)])
    return input, each(stride), each(0 if isinstance(padding, str) else padding), each(dilation)
