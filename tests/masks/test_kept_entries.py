"""Positions and values of the entries that a mask keeps, and writing them back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparsesam.masks.kept_entries import kept_entries, positions_by_sums, positions_of, put_entries
from sparsesam.masks.packed import PackedMask

MASKS = {
    "entries": torch.rand(6, 4, 3, 3, generator=torch.Generator().manual_seed(0)) < 0.4,
    "rows": (torch.arange(6) % 2 == 1).view(6, 1, 1, 1).expand(6, 4, 3, 3),
    "all": torch.ones(6, 4, 3, 3, dtype=torch.bool),
}


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_positions_match_nonzero(share):
    kept = torch.rand(1000) < share
    expected = kept.nonzero().squeeze(1)
    assert torch.equal(positions_of(torch.from_numpy(np.packbits(kept.numpy()))), expected)
    assert torch.equal(positions_by_sums(kept, len(expected)), expected)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", MASKS)
def test_entries_are_in_row_major_order_and_round_trip(kind, memory_format):
    mask = MASKS[kind]
    weight = torch.randn(6, 4, 3, 3).to(memory_format=memory_format)
    entries = kept_entries(weight, PackedMask.pack(mask))
    assert torch.equal(entries.reshape(-1), weight[mask])
    for given in (entries, entries.reshape(-1)):
        put = put_entries(torch.zeros_like(weight), PackedMask.pack(mask), given)
        assert torch.equal(put, weight * mask)
