"""Ascents every k-th step, from a step on, by a part of the batch, or along the momentum."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from tests import cases, oracles


def counted(model, opt, x, y):
    """A closure and the list of its calls."""
    calls = []

    def note():
        calls.append(oracles.flat(cases.weights_of(model)))

    return cases.closure_for(model, opt, x, y, then=note), calls


def run(steps=6, masks=False, **options):
    model = cases.mlp()
    rule = {"mask": sparsesam.fixed_mask(cases.half_masks(model))} if masks else {}
    kind = sparsesam.SSAM if masks else sparsesam.SAM
    opt = kind(cases.sgd(model, momentum=options.pop("momentum", 0.9)), model, rho=0.3, **rule, **options)
    passes, moves = [], []
    for seed in range(steps):
        closure, calls = counted(model, opt, *cases.vectors(seed=seed))
        here = oracles.flat(cases.weights_of(model))
        opt.step(closure)
        passes.append(len(calls))
        moves.append(calls[-1] - here)
    return model, opt, passes, moves


def test_every_kth_step_ascends_and_others_are_plain():
    _, _, passes, moves = run(every=3)
    assert passes == [2, 1, 1, 2, 1, 1]
    assert [bool(move.any()) for move in moves] == [True, False, False, True, False, False]


@pytest.mark.parametrize("masks", [False, True])
def test_last_perturbation_is_reused_between_ascents(masks):
    _, _, passes, moves = run(every=3, off_steps="reuse", masks=masks)
    assert passes == [2, 1, 1, 2, 1, 1]
    torch.testing.assert_close(moves[1], moves[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(moves[2], moves[0], rtol=1e-9, atol=1e-12)
    assert not torch.allclose(moves[3], moves[0])


def test_start_is_first_step_with_perturbation():
    _, _, passes, _ = run(start=4)
    assert passes == [1, 1, 1, 1, 2, 2]


def test_new_mask_ends_reuse_of_last_perturbation():
    model = cases.mlp()
    mask = sparsesam.random_mask(sparsity=0.5, refresh=None)
    opt = sparsesam.SSAM(cases.sgd(model), model, rho=0.3, mask=mask, every=4, off_steps="reuse")
    closure, calls = counted(model, opt, *cases.vectors())
    opt.step(closure)
    opt.refresh_mask(now=True)
    saved = [state["sparsesam_last"] for state in opt.state_dict()["state"].values()]
    assert all(not bool(last.any()) for last in saved)  # it belonged to the old mask
    calls.clear()
    opt.step(closure)
    assert len(calls) == 2  # an ascent of its own


@pytest.mark.parametrize("clone", ["checkpoint", "deepcopy"])
@pytest.mark.parametrize("options", [{}, {"norm": "masked", "ascent": "implicit-dense"}])
def test_reused_perturbation_survives_resume(options, clone):
    model, opt, _, _ = run(steps=4, every=3, off_steps="reuse", masks=True, **options)
    if clone == "deepcopy":
        twin, other = copy.deepcopy((model, opt))
    else:
        file = io.BytesIO()
        torch.save(opt.state_dict(), file)
        file.seek(0)
        twin = copy.deepcopy(model)
        rule = sparsesam.fixed_mask(cases.half_masks(model))
        other = sparsesam.SSAM(cases.sgd(twin), twin, rho=0.3, mask=rule, every=3, off_steps="reuse", **options)
        other.load_state_dict(torch.load(file, weights_only=True))
    for m, o in ((model, opt), (twin, other)):
        closure, calls = counted(m, o, *cases.vectors(seed=9))
        o.step(closure)
        assert len(calls) == 1
    assert cases.same_bits(cases.weights_of(model), cases.weights_of(twin))


def test_masks_due_between_ascents_are_made_at_next_ascent():
    model = cases.mlp()
    rule = sparsesam.random_mask(sparsity=0.5, refresh=2)
    opt = sparsesam.SSAM(cases.sgd(model), model, mask=rule, every=3)
    seen = []
    for seed in range(7):
        opt.step(cases.closure_for(model, opt, *cases.vectors(seed=seed)))
        seen.append(opt.masks["2.weight"])
    changed = [t for t in range(1, 7) if not torch.equal(seen[t], seen[t - 1])]
    assert changed == [3, 6]


def test_momentum_as_direction_takes_one_pass():
    _, _, passes, moves = run(ascent="momentum")
    assert passes == [1] * 6
    assert [bool(move.any()) for move in moves] == [False] + [True] * 5  # there is no momentum yet


def test_ssam_d_uses_momentum_as_gradient():
    model = cases.mlp()
    rule = sparsesam.dynamic_mask(sparsity=0.5, refresh=1)
    opt = sparsesam.SSAM(cases.sgd(model), model, mask=rule, ascent="momentum")
    for seed in range(4):
        opt.step(cases.closure_for(model, opt, *cases.vectors(seed=seed)))
    assert opt.sparsity == pytest.approx(0.5, abs=0.01)


def test_two_phase_loop_can_query_whether_first_pass_is_needed():
    def loop(opt, model, x, y):
        opt.zero_grad()
        if opt.needs_first_pass:
            F.cross_entropy(model(x), y).backward()
        with opt.perturbed():
            F.cross_entropy(model(x), y).backward()
        opt.step()

    for options in ({"every": 2}, {"every": 2, "off_steps": "reuse"}, {"ascent": "momentum"}, {"start": 2}):
        model = cases.mlp()
        twin = copy.deepcopy(model)
        opt, other = (sparsesam.SAM(cases.sgd(m), m, rho=0.2, **options) for m in (model, twin))
        for seed in range(5):
            x, y = cases.vectors(seed=seed)
            loop(opt, model, x, y)
            other.step(cases.closure_for(twin, other, x, y))
        assert cases.same_bits(cases.weights_of(model), cases.weights_of(twin))


# ---- ascent_fraction --------------------------------------------------------------------------------------


def by_batch(model, opt):
    def closure(batch):
        x, y = batch
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


def written_out(model, opt, x, y, kept):
    """The same written out: ascend by the first samples, descend by all."""
    opt.zero_grad()
    F.cross_entropy(model(x[:kept]), y[:kept]).backward()
    with opt.perturbed():
        F.cross_entropy(model(x), y).backward()
    opt.step()


@pytest.mark.parametrize("masked", ["*", "4.*", "2.*"])
@pytest.mark.parametrize("engine", [True, False])
def test_ascent_fraction_equals_written_out_steps(masked, engine):
    model = cases.mlp()
    twin = copy.deepcopy(model)
    opt = cases.ssam(model, masked, ascent_fraction=0.25, engine=engine)
    other = cases.ssam(twin, masked, engine=False)
    for seed in range(4):
        x, y = cases.vectors(16, seed=seed)
        opt.step(by_batch(model, opt), batch=(x, y))
        written_out(twin, other, x, y, 4)
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(twin), rtol=1e-9, atol=1e-11)


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 8))
        self.head = nn.Sequential(nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("engine", [True, False])
def test_normalization_statistics_cover_whole_batch(engine):
    torch.manual_seed(0)
    model = Split().double()
    opt = cases.ssam(model, ascent_fraction=0.25, engine=engine)
    x, y = cases.vectors(16)
    expected = copy.deepcopy(model)
    opt.step(by_batch(model, opt), batch=(x, y))
    expected.train()(x)  # the body is not perturbed, so its statistics are those of a plain pass
    for ours, theirs in zip(model.body.buffers(), expected.body.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert model.head[1].num_batches_tracked == 1


def test_returned_loss_covers_whole_batch():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.3, ascent_fraction=0.25)
    x, y = cases.vectors(16)
    seen = []

    def closure(batch):
        opt.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        seen.append((len(batch[1]), loss.item()))
        return loss

    loss = opt.step(closure, batch=(x, y))
    assert [count for count, _ in seen] == [4, 16]
    assert loss.item() == seen[1][1]


@pytest.mark.parametrize("masked", ["head.*", "*"])
def test_ascent_fraction_with_batch_normalization(masked):
    """The engine changes nothing here either: the fraction of the ascent is normalized separately."""
    ends = []
    for engine in (True, False):
        torch.manual_seed(0)
        model = Split().double()
        opt = cases.ssam(model, masked, ascent_fraction=0.25, engine=engine)
        for seed in range(4):
            opt.step(by_batch(model, opt), batch=cases.vectors(16, seed=seed))
        ends.append(list(model.state_dict().values()))
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every must be"),
        ({"off_steps": "jump"}, "off_steps must be"),
        ({"start": -1}, "start must be"),
        ({"ascent_fraction": 0}, "ascent_fraction must be"),
        ({"ascent_fraction": 1.5}, "ascent_fraction must be"),
    ],
)
def test_bad_values(options, words):
    model = cases.mlp()
    with pytest.raises(ValueError, match=words):
        sparsesam.SAM(cases.sgd(model), model, **options)


def test_ascent_fraction_needs_batch():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, ascent_fraction=0.5)
    with pytest.raises(ValueError, match="batch must be given"):
        opt.step(cases.closure_for(model, opt, *cases.vectors()))


@pytest.mark.parametrize("implementation", ["host", "device"])
@pytest.mark.parametrize(
    "mask", [None, sparsesam.random_mask(sparsity=0.5), sparsesam.random_mask(pattern="filter", sparsity=0.5)]
)
def test_resumed_run_reuses_last_perturbation(implementation, mask):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.scale = cases.mlp(), nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

        def forward(self, x):
            return self.scale * self.layers(x)

    def optimizer(model):
        options = {"rho": 0.1, "every": 3, "off_steps": "reuse"}
        base = cases.sgd(model)
        return (
            sparsesam.SAM(base, model, **options) if mask is None else sparsesam.SSAM(base, model, mask=mask, **options)
        )

    model, again = Scaled(), Scaled()
    opt, resumed = optimizer(model), optimizer(again)
    x, y = cases.vectors()
    with cases.moved_as_on(implementation):
        for step in range(4):
            if step == 1:
                again.load_state_dict(model.state_dict())
                resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
            for one, of in ((opt, model), (resumed, again))[: 1 + (step > 0)]:
                one.step(cases.closure_for(of, one, x, y))
    assert cases.same_bits(cases.weights_of(model), cases.weights_of(again))
