"""One bit per weight, and back."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsesam.masks import packed
from sparsesam.masks.packed import PackedMask


@given(st.lists(st.booleans(), min_size=1, max_size=200), st.integers(1, 8))
def test_unpacking_gives_the_mask_back(values, chunk):
    mask = torch.tensor(values)
    held = PackedMask.pack(mask)
    assert torch.equal(held.unpack(), mask)
    assert held.count == int(mask.sum())
    assert torch.equal(PackedMask.from_state_dict(held.state_dict()).unpack(), mask)
    if held.bits is not None:
        assert len(held.bits) == (len(values) + 7) // 8


@given(st.lists(st.booleans(), min_size=2, max_size=300))
def test_chunks_list_every_kept_position_in_order(values):
    held = PackedMask.pack(torch.tensor(values))
    if held.bits is None:
        return
    original, packed._CPU_CHUNK = packed._CPU_CHUNK, 16
    try:
        found = [start + int(i) for start, _, kept in held.chunks() for i in kept]
    finally:
        packed._CPU_CHUNK = original
    assert found == [i for i, value in enumerate(values) if value]


def test_the_way_other_devices_unpack_is_the_same():
    mask = torch.rand(1001) < 0.3
    bits = PackedMask.pack(mask).bits
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8)
    assert torch.equal((bits[:, None] & weights).ne(0).reshape(-1)[:1001], mask)
