"""Mixup (Zhang et al. 2018): each image is blended with another one, and so are their labels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot


def mixup(
    images: Tensor, labels: Tensor, *, alpha: float, num_classes: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """lam x + (1 - lam) x' and lam y + (1 - lam) y', with one lam ~ Beta(alpha, alpha) for the batch.

    ``labels`` are (n,) classes; the result's are (n, num_classes) probabilities, as `cross_entropy` takes them.
    """
    device = generator.device
    # Beta(a, a) from two Gamma(a) draws; torch.distributions does not take a generator.
    both = torch._standard_gamma(torch.full((2,), alpha, device=device, dtype=torch.float64), generator=generator)
    share = float(both[0] / both.sum()) if both.sum() > 0 else 1.0
    other = torch.randperm(len(labels), generator=generator, device=device).to(labels.device)
    targets = one_hot(labels, num_classes).to(images.dtype)
    return torch.lerp(images[other], images, share), torch.lerp(targets[other], targets, share)
