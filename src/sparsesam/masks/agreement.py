"""What ranks must agree on: the masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor
from torch import distributed as dist

from sparsesam.distributed.agreement import all_agree, communication_device, is_distributed, require_same
from sparsesam.masks.errors import NonFiniteScoreError
from sparsesam.masks.packed import PackedMask


def agree_on_masks(
    make: Callable[[], dict[str, PackedMask]], group: dist.ProcessGroup | None = None
) -> dict[str, PackedMask]:
    """The masks as they are made, which must be the same on every rank of the group, if there is one.

    Each rank draws with the same generator from the same scores, so a hash of eight bytes is all that is sent. Masks
    that differ, or scores that are not finite on one rank, are an error on all of them.
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
    require_same(_content(masks), "the masks", group)
    return masks


def _content(masks: dict[str, PackedMask]) -> Iterator[Tensor | int | str]:
    for name, mask in masks.items():
        yield from (name, str(tuple(mask.shape)), mask.count)
        if mask.bits is not None:
            yield mask.bits
