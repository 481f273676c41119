"""Entries that a mask keeps, as checkpoints hold them: with the parameters' own shapes, zero outside the mask."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparsesam.ascent.extrapolation import kept_entries
from sparsesam.distributed import local_part
from sparsesam.masks.packed import PackedMask

Masks = Mapping[str, PackedMask]


def dense_entries(
    kept: Mapping[str, Tensor], masks: Masks | None, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """One tensor like each parameter, whether or not entries of it are kept."""
    dense = {name: torch.zeros_like(parameter, requires_grad=False) for name, parameter in parameters.items()}
    for name, entries in kept.items():
        mask, here = None if masks is None else masks.get(name), local_part(dense[name])
        if mask is None or mask.is_full or entries.shape == mask.shape:
            here.copy_(entries)
        else:
            here[mask.unpack(entries.device)] = entries.reshape(-1)
    return dense


def kept_in(dense: Mapping[str, Tensor], masks: Masks | None, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The kept entries of each tensor, or of the part of it that this rank holds: whole, as rows, or as a vector."""
    kept = {}
    for name, one in dense.items():
        mask = None if masks is None else masks.get(name)
        if mask is None or not mask.is_empty:
            kept[name] = kept_entries(local_part(one, parameters[name]), mask).clone()
    return kept
