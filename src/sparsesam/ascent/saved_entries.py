"""Entries that a mask keeps, as checkpoints hold them: with the parameters' own shapes, zero outside the mask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from sparsesam.ascent.extrapolation import kept_entries
from sparsesam.masks.packed import PackedMask

Masks = Mapping[str, PackedMask]


def dense_entries(
    kept: Mapping[str, Tensor], masks: Masks | None, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """One tensor like each parameter, whether or not entries of it are kept."""
    dense = {name: torch.zeros_like(parameter, requires_grad=False) for name, parameter in parameters.items()}
    for name, entries in kept.items():
        mask = None if masks is None else masks.get(name)
        if mask is None or mask.is_full or entries.shape == mask.shape:
            dense[name].copy_(entries)
        else:
            dense[name][mask.unpack(entries.device)] = entries.reshape(-1)
    return dense


def kept_in(dense: Mapping[str, Tensor], names: Iterable[str], masks: Masks | None) -> dict[str, Tensor]:
    """The kept entries of the named tensors: whole, as rows, or as a vector."""
    known = [name for name in names if name in dense]
    return {name: kept_entries(dense[name], None if masks is None else masks.get(name)).clone() for name in known}
