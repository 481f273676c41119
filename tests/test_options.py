"""Ascents every k-th step, from a step on, by a part of the batch, or along the momentum; a scheduled rho."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from tests import cases, oracles


def counted(model, opt, x, y):
    """A closure and the weights at its calls."""
    calls = []
    return cases.closure_for(model, opt, x, y, then=lambda: calls.append(oracles.flat(cases.weights_of(model)))), calls


def run(make=sparsesam.SAM, steps=6, **options):
    """The number of passes of each step, and e in the last of them."""
    model = cases.mlp()
    opt = make(cases.sgd(model), model, 0.3, **options)
    passes, moves = [], []
    for seed in range(steps):
        closure, calls = counted(model, opt, *cases.vectors(seed=seed))
        here = oracles.flat(cases.weights_of(model))
        opt.step(closure)
        passes.append(len(calls))
        moves.append(calls[-1] - here)
    return passes, moves


@pytest.mark.parametrize(
    ("make", "options", "passes", "is_moved"),
    [
        (sparsesam.SAM, {"every": 3}, [2, 1, 1, 2, 1, 1], [1, 0, 0, 1, 0, 0]),
        (sparsesam.SAM, {"start": 4}, [1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1]),
        (sparsesam.SAM, {"start": 1, "every": 2}, [1, 2, 1, 2, 1, 2], [0, 1, 0, 1, 0, 1]),
        (sparsesam.SAM, {"mask": sparsesam.random_mask(sparsity=1.0)}, [1] * 6, [0] * 6),
        (sparsesam.MomentumSAM, {}, [1] * 6, [0, 1, 1, 1, 1, 1]),  # there is no momentum yet
        (sparsesam.ExtrapolatedSAM, {"start": 3, "every": 2}, [1] * 6, [0, 0, 0, 1, 0, 1]),
    ],
)
def test_passes_and_perturbed_steps(make, options, passes, is_moved):
    found, moves = run(make, **options)
    assert (found, [int(move.any()) for move in moves]) == (passes, is_moved)


def test_masks_due_between_ascents_are_made_at_next_ascent():
    model = cases.mlp()
    opt = cases.ssam(model, sparsesam.random_mask(sparsity=0.5, refresh=2), every=3)
    seen = []
    for seed in range(7):
        cases.train(model, opt, [seed])
        seen.append(opt.masks["2.weight"])
    assert [t for t in range(1, 7) if not torch.equal(seen[t], seen[t - 1])] == [3, 6]


def test_schedule_sets_rho_from_its_first_value():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.4, rho_schedule=sparsesam.Warmup(4))
    found = []
    for seed in range(5):
        cases.train(model, opt, [seed])
        found.append(opt.param_groups[0]["rho"])
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


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


def by_minimize(opt, loss_of, batch):
    return opt.minimize(loss_of, batch=batch)


def by_closure(opt, loss_of, batch):
    def closure(part):
        opt.zero_grad()
        loss = loss_of(part)
        loss.backward()
        return loss

    return opt.step(closure, batch=batch)


@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize("masked", ["head.*", "*", "body.3.*"])
@pytest.mark.parametrize("way", [by_minimize, by_closure])
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

        loss = way(opt, loss_of, (x, y))
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
