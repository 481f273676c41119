"""Ascents every k-th step, from a step on, by a part of the batch, or along the momentum; a scheduled rho."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from tests import cases


def run(make=sparsesam.SAM, **options):
    """The number of passes of each of six steps, and whether the last of them is at w + e."""
    model, opt = cases.made(make, 0.3, **options)
    passes, moved = [], []
    for seed in range(6):
        before, calls = cases.weights_of(model), []
        remember = partial(lambda calls: calls.append((opt.in_second_pass, cases.weights_of(model))), calls)
        opt.step(cases.closure_for(model, opt, *cases.vectors(seed=seed), then=remember))
        passes.append(len(calls))
        assert [is_second for is_second, _ in calls] == [False, True][: len(calls)]
        moved.append(not cases.same_bits(calls[-1][1], before))
    return passes, moved


@pytest.mark.parametrize(
    ("make", "options", "passes", "is_moved"),
    [
        (sparsesam.SAM, {"every": 3}, [2, 1, 1, 2, 1, 1], [1, 0, 0, 1, 0, 0]),
        (sparsesam.SAM, {"start": 4}, [1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1]),
        (sparsesam.SAM, {"start": 1, "every": 2}, [1, 2, 1, 2, 1, 2], [0, 1, 0, 1, 0, 1]),
        (sparsesam.SAM, {"mask": sparsesam.random_mask(sparsity=1.0)}, [1] * 6, [0] * 6),
        *((kind, {}, [2] * 6, [1] * 6) for kind in (sparsesam.GSAM, sparsesam.WSAM, sparsesam.FriendlySAM)),
        (sparsesam.LookSAM, {"every": 2}, [2, 1, 2, 1, 2, 1], [1, 0, 1, 0, 1, 0]),
        (sparsesam.MomentumSAM, {}, [1] * 6, [0, 1, 1, 1, 1, 1]),  # there is no momentum yet
        (sparsesam.ExtrapolatedSAM, {"start": 3, "every": 2}, [1] * 6, [0, 0, 0, 1, 0, 1]),
    ],
)
def test_passes_and_perturbed_steps(make, options, passes, is_moved):
    assert run(make, **options) == (passes, is_moved)


def test_masks_due_between_ascents_are_made_at_next_ascent():
    model = cases.mlp()
    opt = cases.ssam(model, sparsesam.random_mask(sparsity=0.5, refresh=2), every=3)
    seen = []
    for seed in range(7):
        cases.train(model, opt, [seed])
        seen.append(opt.masks["2.weight"])
    assert [t for t in range(1, 7) if not torch.equal(seen[t], seen[t - 1])] == [3, 6]


# ---- ascent_fraction ---------------------------------------------------------------------------------------------


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 8))
        self.head = nn.Sequential(nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, x):
        return self.head(self.body(x))


def split():
    torch.manual_seed(0)
    return Split().double()


def by_closure(opt, loss_of, batch):
    return opt.step(lambda part: cases.closure_of(opt, lambda: loss_of(part))(), batch=batch)


@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize("masked", ["head.*", "*", "body.3.*"])
@pytest.mark.parametrize("way", [sparsesam.SAM.minimize, by_closure])
def test_ascent_fraction_equals_written_out_steps(way, masked, engine):
    """Ascend by the first samples, descend by all; statistics and the loss that is returned cover the whole batch."""
    model, twin = split(), split()
    opt = cases.ssam(model, masked, ascent_fraction=0.2, engine=engine)
    other = cases.ssam(twin, masked, engine=False)
    for seed in range(4):
        x, y = cases.vectors(16, seed=seed)
        seen = []

        def loss_of(batch, seen=seen):
            loss = F.cross_entropy(model(batch[0]), batch[1])
            seen.append((len(batch[1]), loss.item()))
            return loss

        loss = way(opt, loss_of, batch=(x, y))
        assert [count for count, _ in seen] == [4, 16]  # 0.2 * 16 is rounded up
        assert loss.item() == seen[1][1]
        statistics = copy.deepcopy(list(twin.buffers()))
        other.zero_grad()
        F.cross_entropy(twin(x[:4]), y[:4]).backward()
        for buffer, before in zip(twin.buffers(), statistics, strict=True):
            buffer.copy_(before)
        with other.perturbed():
            F.cross_entropy(twin(x), y).backward()
            statistics = copy.deepcopy(list(twin.buffers()))
        for buffer, after in zip(twin.buffers(), statistics, strict=True):
            buffer.copy_(after)
        other.step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-9, atol=1e-11)
    if engine and masked != "*":
        assert "only a part of the batch" in opt.savings().ended
