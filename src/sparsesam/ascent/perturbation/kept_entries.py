"""Entries of a weight that a mask keeps: the weight itself, whole rows of it, or a vector in row-major order."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparsesam.ascent.perturbation.kept_positions import positions_of
from sparsesam.distributed import local_part
from sparsesam.masks.packed import PackedMask

Masks = Mapping[str, PackedMask]


def kept_entries(weight: Tensor, mask: PackedMask | None) -> Tensor:
    """The weight itself where all of it is kept, whole rows if the mask is made of them, otherwise a vector."""
    if mask is None or mask.is_full:
        return weight
    if mask.rows is not None:
        return weight.index_select(0, mask.rows)
    kept = mask.unpack(weight.device)
    if weight.device.type == "cpu":
        return weight.masked_select(kept)
    return weight.flatten().index_select(0, positions_of(kept.flatten(), mask.count))  # masked_select waits for a count


def put_entries(weight: Tensor, mask: PackedMask | None, entries: Tensor) -> Tensor:
    """Write what `kept_entries` gave to their places."""
    if mask is None or entries.shape == weight.shape:
        return weight.copy_(entries)
    if mask.rows is not None and entries.dim() == weight.dim():
        return weight.index_copy_(0, mask.rows, entries)
    return weight.masked_scatter_(mask.unpack(weight.device), entries)


def dense_entries(
    kept: Mapping[str, Tensor], masks: Masks | None, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """As checkpoints hold them: one tensor like each parameter, zero where no entry is kept."""
    dense = {name: torch.zeros_like(parameter, requires_grad=False) for name, parameter in parameters.items()}
    for name, entries in kept.items():
        put_entries(local_part(dense[name]), None if masks is None else masks.get(name), entries)
    return dense


def kept_in(dense: Mapping[str, Tensor], masks: Masks | None, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The kept entries of each such tensor, or of the part of it that this rank holds."""
    kept = {}
    for name, one in dense.items():
        mask = None if masks is None else masks.get(name)
        if mask is None or not mask.is_empty:
            kept[name] = kept_entries(local_part(one, parameters[name]), mask).clone()
    return kept
