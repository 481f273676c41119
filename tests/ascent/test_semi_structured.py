"""2:4 on GPUs: the guards and the dispatch, on a CPU. The product itself has not been run on a GPU yet."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import sparsesam
from sparsesam.ascent import semi_structured
from sparsesam.masks.packed import PackedMask


def two_of_four(rows=128, columns=64):
    scores = torch.rand(rows, columns, generator=torch.Generator().manual_seed(0))
    return PackedMask.pack(sparsesam.NM(2, 4).select({"w": scores})["w"])


def test_the_masks_of_the_2_4_pattern_are_recognised():
    mask = two_of_four().unpack()
    assert semi_structured.is_two_of_four(mask)
    assert not semi_structured.is_two_of_four(~torch.zeros_like(mask))
    assert not semi_structured.is_two_of_four(mask[:6])
    assert not semi_structured.is_two_of_four(mask.t().contiguous())


def test_guards():
    mask, weight, dy = two_of_four(), torch.randn(128, 64).bfloat16(), torch.randn(8, 128).bfloat16()
    assert semi_structured.fits(dy, weight, mask)
    assert not semi_structured.fits(dy.float(), weight.float(), mask)
    assert not semi_structured.fits(dy[:3], weight, mask)
    assert not semi_structured.fits(torch.randn(8, 100).bfloat16(), torch.randn(100, 64).bfloat16(), two_of_four(100))
    full = PackedMask.pack(torch.ones(128, 64, dtype=torch.bool))
    assert not semi_structured.fits(dy, weight, full)
    assert not semi_structured.can_pack(dy, weight, mask)  # this is not a GPU


def test_what_is_packed_is_the_masked_weight_transposed_and_contiguous(monkeypatch):
    packed = []

    def pack(dense):
        packed.append(dense)
        return dense  # F.linear with the dense matrix is what the packed one computes

    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", pack)
    monkeypatch.setattr(semi_structured, "can_pack", semi_structured.fits)
    mask = two_of_four()
    weight = torch.randn(128, 64).bfloat16()
    for shape in ((8, 128), (2, 4, 128)):
        dy = torch.randn(shape).bfloat16()
        dx = semi_structured.input_gradient(dy, weight, mask)
        torch.testing.assert_close(dx, dy @ (weight * mask.unpack()))
    assert torch.equal(packed[0], (weight * mask.unpack()).t())
    assert packed[0].is_contiguous()
    groups = packed[0].view(64, 32, 4)  # two of four along the rows of what is packed
    assert ((groups != 0).sum(-1) <= 2).all()


def test_each_ascent_packs_the_weights_of_its_own_step(monkeypatch):
    seen = []

    def gradient(dy, weight, mask):
        seen.append(weight.clone())
        return dy @ (weight * mask.unpack())

    monkeypatch.setattr("sparsesam.ascent.layers.input_gradient", gradient)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    rule = sparsesam.random_mask(pattern="2:4")
    opt = sparsesam.SSAM(
        torch.optim.SGD(model.parameters(), lr=0.1), model, mask=rule, norm="masked", ascent="implicit"
    )
    x, y = torch.randn(8, 64), torch.randint(0, 64, (8,))

    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    opt.step(closure)
    opt.step(closure)
    assert len(seen) == 2
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with sparse tensor cores")
def test_the_sparse_product_equals_the_masked_dense_one():
    mask = two_of_four().to(torch.device("cuda"))
    weight, dy = torch.randn(128, 64).bfloat16().cuda(), torch.randn(64, 128).bfloat16().cuda()
    found = semi_structured.sparse_input_gradient(dy, weight, mask)
    torch.testing.assert_close(found, dy @ (weight * mask.unpack()), rtol=1e-2, atol=1e-2)
