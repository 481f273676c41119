"""Label noise: memorizing it takes sharp minima, so flat ones show most clearly here."""

from __future__ import annotations

import torch
from torch import Tensor


def flip_labels(labels: Tensor, *, fraction: float, num_classes: int, generator: torch.Generator) -> Tensor:
    """A copy of (n,) integer labels in which round(fraction * n) became a different class.

    Which labels change, and to which of the other classes, is uniform.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be in [0, 1], got {fraction}; 0 keeps every label, 1 changes all")
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, got {num_classes}; one class has no other to flip to")
    count = round(fraction * len(labels))
    chosen = torch.randperm(len(labels), generator=generator)[:count]
    shift = torch.randint(1, num_classes, (count,), generator=generator)
    flipped = labels.clone()
    flipped[chosen] = (labels[chosen] + shift) % num_classes
    return flipped
