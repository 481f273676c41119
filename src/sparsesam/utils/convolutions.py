"""Arguments of convolutions, as their backward kernels take them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F


def expand_arguments(
    input: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any
) -> tuple[Tensor, list[int], list[int], list[int]]:
    """Returns the input, and stride, padding and dilation of each dimension.

    With an uneven padding="same" the input has one more zero at its end, as torch adds it.
    """
    dimensions = weight.dim() - 2

    def each(option: Any) -> list[int]:
        sizes = [option] if isinstance(option, int) else list(option)
        return sizes * dimensions if len(sizes) == 1 else sizes

    if padding == "same":
        totals = [spread * (size - 1) for size, spread in zip(weight.shape[2:], each(dilation), strict=True)]
        padding = [total // 2 for total in totals]
        if any(total % 2 for total in totals):
            input = F.pad(input, [side for total in reversed(totals) for side in (0, total % 2)])
    return input, each(stride), each(0 if padding == "valid" else padding), each(dilation)
