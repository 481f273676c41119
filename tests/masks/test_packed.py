"""Masks with one bit per weight, and the positions of the entries that they keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsesam.masks.packed import PackedMask, positions_by_sums, positions_of, unpack_bits_on_device


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_unpack_inverts_pack(values):
    mask = torch.tensor(values)
    held = PackedMask.pack(mask)
    assert torch.equal(held.unpack(), mask)
    assert held.count == int(mask.sum())
    if held.bits is not None:
        assert len(held.bits) == (len(values) + 7) // 8
        assert torch.equal(unpack_bits_on_device(held.bits)[: len(mask)], mask)


def test_placed_mask_knows_its_rows():
    mask = torch.zeros(6, 4, 3, 3, dtype=torch.bool)
    mask[1::2] = True
    placed = PackedMask.pack(mask).placed(torch.device("meta"))
    assert placed.bits.is_meta
    assert placed.rows.is_meta
    assert len(placed.rows) == 3
    mask[0, 0] = True
    assert PackedMask.pack(mask).placed(torch.device("meta")).rows is None


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_positions_match_nonzero(share):
    kept = torch.rand(1000) < share
    expected = kept.nonzero().squeeze(1)
    assert torch.equal(positions_of(torch.from_numpy(np.packbits(kept.numpy()))), expected)
    assert torch.equal(positions_by_sums(kept, len(expected)), expected)
