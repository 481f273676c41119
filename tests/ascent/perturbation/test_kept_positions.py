"""Positions of kept entries in the vector that joins several weights."""

from __future__ import annotations

import pytest
import torch

from sparsesam.ascent.perturbation.kept_positions import KeptPositions, joined, positions_by_sums, positions_of
from sparsesam.masks.packed import PackedMask


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("share", [0.1, 0.45, 0.5, 0.9, "rows"])
def test_they_are_those_of_nonzero(share, memory_format):
    generator = torch.Generator().manual_seed(0)
    weights = [torch.empty(6, 4, 3, 3).to(memory_format=memory_format), torch.empty(7), torch.empty(5, 3)]
    masks = [torch.rand(weight.shape, generator=generator) < (0.5 if share == "rows" else share) for weight in weights]
    if share == "rows":
        masks = [torch.arange(len(mask)).view(-1, *[1] * (mask.dim() - 1)).expand_as(mask) % 2 == 1 for mask in masks]
    packed = [PackedMask.pack(mask) for mask in masks]
    kept = KeptPositions(packed, weights)
    assert torch.equal(kept.find(), joined(masks, weights).nonzero().squeeze(1))
    assert kept.lengths == [int(mask.sum()) for mask in masks]
    assert kept.fits(packed, weights)
    assert not kept.fits([PackedMask.pack(mask) for mask in masks], weights)
    assert not kept.fits(packed, [weights[0].permute(1, 0, 2, 3), *weights[1:]])


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_both_ways_of_finding_them_are_those_of_nonzero(share):
    kept = torch.rand(1000) < share
    for find in (positions_of, positions_by_sums):
        assert torch.equal(find(kept, int(kept.sum())), kept.nonzero().squeeze(1))
