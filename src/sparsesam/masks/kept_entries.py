"""The entries of a weight that a mask keeps: the weight itself, whole rows, or a vector in row-major order."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from sparsesam.distributed.shards import local_part
from sparsesam.masks.packed import PackedMask, unpack_bits


def kept_entries(weight: Tensor, mask: PackedMask | None) -> Tensor:
    """Returns the weight itself if all of it is kept, whole rows if the mask consists of rows, otherwise a vector."""
    if mask is None or mask.is_full:
        return weight
    if mask.bits is None:
        return weight.reshape(-1)[:0]
    if mask.rows is not None:
        return weight.index_select(0, mask.rows)
    return weight.reshape(-1).index_select(0, positions_of(mask.bits, mask.count))


def put_entries(weight: Tensor, mask: PackedMask | None, entries: Tensor) -> Tensor:
    """Write the result of `kept_entries`, or the same as a vector, back to the weight, in the weight's dtype."""
    entries = entries.to(weight.dtype)  # that of the model may have changed since
    if mask is None or mask.is_full:
        return weight.copy_(entries.view(weight.shape))
    if mask.bits is None:
        return weight
    if mask.rows is not None:
        return weight.index_copy_(0, mask.rows, entries.view(-1, *weight.shape[1:]))
    vector = weight.reshape(-1).scatter_(0, positions_of(mask.bits, mask.count), entries)
    return weight if weight.is_contiguous() else weight.copy_(vector.view(weight.shape))


def positions_of(bits: Tensor, count: int = 0) -> Tensor:
    """Returns the positions of set bits; their number ``count`` saves a synchronization with a device."""
    if bits.device.type == "cpu":  # ten times faster than torch.nonzero
        return torch.from_numpy(np.flatnonzero(np.unpackbits(bits.numpy()).view(np.bool_)))
    kept = unpack_bits(bits)
    if bits.device.type in ("cuda", "xpu", "meta") and torch.__version__ >= "2.7":
        return torch.nonzero_static(kept, size=count).squeeze(1)
    return positions_by_sums(kept, count)


def positions_by_sums(kept: Tensor, count: int) -> Tensor:
    """Replaces nonzero_static where torch lacks it; all zeros are written to a first place, which is dropped."""
    places = kept.cumsum(0).masked_fill_(~kept, 0)
    found = places.new_empty(count + 1)
    return found.scatter_(0, places, torch.arange(len(kept), device=kept.device))[1:]


def dense_entries(
    kept: Mapping[str, Tensor], masks: Mapping[str, PackedMask] | None, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns kept entries as checkpoints store them: tensors shaped like the parameters, zero outside the masks.

    Entries of parameters that are not in ``parameters``, because they are frozen now, are left out.
    """
    dense = {name: torch.zeros_like(parameter, requires_grad=False) for name, parameter in parameters.items()}
    for name in kept.keys() & dense.keys():
        put_entries(local_part(dense[name]), None if masks is None else masks.get(name), kept[name])
    return dense


def kept_in(
    dense: Mapping[str, Tensor], masks: Mapping[str, PackedMask] | None, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The inverse of `dense_entries`: returns the kept entries of each tensor, or of this rank's part of it."""
    return {
        name: kept_entries(local_part(tensor, parameters[name]), None if masks is None else masks.get(name)).clone()
        for name, tensor in dense.items()
    }
