"""One bit per weight, and back."""

from __future__ import annotations

import pytest
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
    if held.bits is not None:
        assert len(held.bits) == (len(values) + 7) // 8


@given(st.lists(st.booleans(), min_size=2, max_size=300))
def test_chunks_list_every_kept_position_in_order(values):
    held = PackedMask.pack(torch.tensor(values))
    if held.bits is None:
        return
    original, packed._CHUNK = packed._CHUNK, 16
    try:
        found = [start + int(i) for start, _, kept in held.chunks() for i in kept]
    finally:
        packed._CHUNK = original
    assert found == [i for i, value in enumerate(values) if value]


@pytest.mark.parametrize("size", [1, 8, 1001])
def test_the_way_other_devices_pack_and_unpack_is_the_same(size):
    mask = torch.rand(size) < 0.3
    bits = packed.pack_bits(mask)
    assert torch.equal(packed._pack_bits_on_device(mask), bits)
    assert torch.equal(packed._unpack_bits_on_device(bits)[:size], mask)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("share", "kind"), [(0.3, "entries"), (0.7, "bits"), (None, "rows")])
def test_an_indexed_mask_is_the_same_mask(share, kind, memory_format):
    weight = torch.empty(6, 4, 3, 3).to(memory_format=memory_format)
    mask = torch.rand(weight.shape) < share if share else torch.zeros(weight.shape, dtype=torch.bool)
    if share is None:
        mask[1::2] = True
    plain = PackedMask.pack(mask)
    indexed = plain.indexed(weight)
    assert indexed.index.kind == kind
    assert indexed.count == plain.count
    assert torch.equal(indexed.unpack(), mask)
    assert torch.equal(indexed.bits, plain.bits)
    if kind == "entries":
        assert indexed.index.values.dtype == torch.int32
        values = torch.arange(mask.numel()).view(mask.shape).to(memory_format=memory_format)
        kept = values.as_strided((mask.numel(),), (1,))[indexed.index.values]
        assert torch.equal(kept.sort().values, values[mask].sort().values)
    if kind == "rows":
        assert torch.equal(indexed.rows, torch.tensor([1, 3, 5]))
    assert indexed.indexed(weight) is indexed
    assert torch.equal(indexed.placed(weight).bits, plain.bits)  # on a CPU, bits again
    assert indexed.placed(weight).index is None


def test_an_index_follows_the_layout_of_its_weight():
    weight = torch.empty(6, 4, 3, 3)
    mask = torch.rand(weight.shape) < 0.3
    indexed = PackedMask.pack(mask).indexed(weight)
    again = indexed.indexed(weight.to(memory_format=torch.channels_last))
    assert again is not indexed
    assert torch.equal(again.unpack(), mask)


def test_n_of_m_is_told_along_the_output_dimension():
    mask = torch.tensor([[1, 0], [1, 1], [0, 1], [0, 0]] * 2, dtype=torch.bool)
    assert PackedMask.pack(mask).is_n_of_m(2, 4)
    assert not PackedMask.pack(mask).is_n_of_m(1, 2)
    assert not PackedMask.pack(mask.t().contiguous()).is_n_of_m(2, 4)
    assert not PackedMask.pack(mask[:6]).is_n_of_m(2, 4)
    assert not PackedMask.pack(torch.ones_like(mask)).is_n_of_m(2, 4)
