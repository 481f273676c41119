"""What ranks must agree on: the masks."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import distributed as dist

from sparsesam.distributed.agreement import (
    all_agree,
    communication_device,
    hash_of,
    is_distributed,
    name_ranks,
    ranks_that_differ,
)
from sparsesam.masks.errors import NonFiniteScoreError
from sparsesam.masks.packed import PackedMask


def agree_on_masks(
    make: Callable[[], dict[str, PackedMask]], group: dist.ProcessGroup | None = None
) -> dict[str, PackedMask]:
    """The same masks on every rank of the group; without a process group, the masks as they are made.

    Each rank draws with the same generator from what should be the same data, so a hash of eight bytes is all that is
    sent. Where it differs, the masks of the group's first rank are sent to all, and a warning names the others. Scores
    that are not finite on one rank are an error on all of them.
    """
    if not is_distributed() or dist.get_world_size(group) == 1:
        return make()
    masks, error = None, None
    try:
        masks = make()
    except NonFiniteScoreError as caught:
        error = caught
    if not all_agree(error is None, communication_device(group), group) or masks is None:
        raise error or NonFiniteScoreError("the scores of another rank are not finite")
    different = ranks_that_differ(_hash(masks), group)
    if not different:
        return masks
    first = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
    warnings.warn(
        f"the masks that {name_ranks(different)} made differ from rank {first}'s, which all ranks take over; give "
        "every rank the same seed and the same data for the mask (not its own part), or expect this with "
        'ascent_scope="local" and a mask made from gradients',
        RuntimeWarning,
        stacklevel=3,
    )
    return _broadcast_masks(masks, first, group)


def _hash(masks: dict[str, PackedMask]) -> int:
    parts: list[torch.Tensor | int | str] = []
    for name, mask in masks.items():
        parts += [name, str(tuple(mask.shape)), mask.count]
        if mask.bits is not None:
            parts.append(mask.bits)
    return hash_of(parts)


def _broadcast_masks(
    masks: dict[str, PackedMask], source: int, group: dist.ProcessGroup | None
) -> dict[str, PackedMask]:
    device = communication_device(group)

    def broadcast(tensor: torch.Tensor) -> torch.Tensor:
        shared = tensor.to(device, copy=True)
        dist.broadcast(shared, src=source, group=group)
        return shared

    counts = broadcast(torch.tensor([mask.count for mask in masks.values()])).tolist()
    agreed = {}
    for (name, mask), count in zip(masks.items(), counts, strict=True):
        bits = None
        if 0 < count < mask.numel:
            mine = mask.bits if mask.bits is not None else torch.zeros((mask.numel + 7) // 8, dtype=torch.uint8)
            bits = broadcast(mine).to(mine.device if mask.bits is not None else device)
        agreed[name] = PackedMask(mask.shape, count, bits)
    return agreed
