"""What ranks must agree on: the masks. Gradients are already averaged by the user's DDP."""

from __future__ import annotations

import torch
from torch import distributed as dist

from sparsesam.masks.packed import PackedMask


def broadcast_masks(masks: dict[str, PackedMask]) -> dict[str, PackedMask]:
    """Every rank takes rank 0's masks; without a process group, the masks as they are.

    Each rank draws with the same generator from what should be the same data, so this normally changes
    nothing; it removes the chance that a rounding difference makes ranks perturb different weights.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return masks
    counts = torch.tensor([mask.count for mask in masks.values()])
    agreed = {}
    device = _communication_device()
    counts = _broadcast(counts, device)
    for (name, mask), count in zip(masks.items(), counts.tolist(), strict=True):
        bits = None
        if 0 < count < mask.numel:
            mine = mask.bits if mask.bits is not None else torch.zeros((mask.numel + 7) // 8, dtype=torch.uint8)
            bits = _broadcast(mine, device).to(mine.device if mask.bits is not None else device)
        agreed[name] = PackedMask(mask.shape, count, bits)
    return agreed


def _communication_device() -> torch.device:
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _broadcast(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    shared = tensor.to(device, copy=True)
    dist.broadcast(shared, src=0)
    return shared
