"""Label noise, which flat minima memorize less than sharp ones."""

from __future__ import annotations

import torch
from torch import Tensor


def flip_labels(labels: Tensor, *, fraction: float, num_classes: int, generator: torch.Generator) -> Tensor:
    """A copy of (n,) integer labels in which round(fraction * n) became a different class.

    Which labels change, and to which of the other classes, is uniform: symmetric noise, in which a changed label
    is always wrong.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be in [0, 1], got {fraction}; 0 keeps every label, 1 changes all")
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, got {num_classes}; one class has no other to flip to")
    if len(labels) and not (labels.min() >= 0 and labels.max() < num_classes):
        raise ValueError(
            f"labels must be in 0..{num_classes - 1} for num_classes={num_classes}, got {int(labels.min())} to "
            f"{int(labels.max())}"
        )
    count = round(fraction * len(labels))
    chosen = torch.randperm(len(labels), generator=generator, device=generator.device)[:count].to(labels.device)
    shift = torch.randint(1, num_classes, (count,), generator=generator, device=generator.device).to(labels.device)
    flipped = labels.clone()
    flipped[chosen] = (labels[chosen] + shift) % num_classes
    return flipped
