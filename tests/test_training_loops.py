"""Training loops that users write: precision, accumulation, schedulers, unusual models."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from tests import cases, oracles

# ---- precision -------------------------------------------------------------------------------------------


def half_masked(model):
    return sparsesam.SSAM(cases.sgd(model), model, rho=0.1, mask=sparsesam.fixed_mask(cases.half_masks(model)))


def test_two_phase_grad_scaler_changes_only_rounding():
    model = cases.convnet()
    twin = copy.deepcopy(model)
    opt, other = half_masked(model), half_masked(twin)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for seed in range(6):
        x, y = cases.images(seed=seed)
        cases.both_passes(other, twin, x, y)
        other.step()
        opt.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        with opt.perturbed():
            scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
    assert opt.steps == 6
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(twin), rtol=1e-4, atol=1e-6)


def test_grad_scaler_with_closure():
    model = cases.convnet()
    twin = copy.deepcopy(model)
    opt, other = half_masked(model), half_masked(twin)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, y = cases.images()
    closure = cases.closure_for(model, opt, x, y, backward=lambda loss: scaler.scale(loss).backward())
    for _ in range(3):
        opt.step(closure, scaler=scaler)
        scaler.update()
        other.step(cases.closure_for(twin, other, x, y))
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(twin), rtol=1e-4, atol=1e-6)


def test_error_of_scaler_does_not_outlive_step():
    model = cases.convnet()
    opt = half_masked(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    closure = cases.closure_for(model, opt, *cases.images(), backward=lambda loss: scaler.scale(loss).backward())
    with mock.patch.object(opt.base, "step", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        opt.step(closure, scaler=scaler)
    with mock.patch.object(scaler, "step", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        opt.step(closure, scaler=scaler)
    scaler.update(2.0**10)
    opt.step(closure, scaler=scaler)
    assert opt.steps == 1


def test_step_skipped_by_scaler_leaves_weights_and_count_unchanged():
    model = cases.convnet()
    opt = half_masked(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, y = cases.images()
    before = cases.weights_of(model)
    opt.zero_grad()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    with opt.perturbed():
        scaler.scale(F.cross_entropy(model(x), y) * torch.inf).backward()
    scaler.step(opt)
    scaler.update()
    assert cases.same_bits(before, cases.weights_of(model))
    assert opt.steps == 0
    assert scaler.get_scale() == 2.0**9
    cases.both_passes(opt, model, x, y)
    opt.step()
    assert opt.steps == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model = cases.convnet()
    opt = half_masked(model)
    x, y = cases.images()
    losses = []
    for _ in range(10):
        before = cases.weights_of(model)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        with opt.perturbed():
            with torch.autocast("cpu", dtype=dtype):
                again = F.cross_entropy(model(x), y)
            again.backward()
        assert cases.same_bits(before, cases.weights_of(model))
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# ---- accumulation, clipping, schedulers ------------------------------------------------------------------


def test_accumulation_over_micro_batches_equals_whole_batch():
    model = cases.mlp()
    twin = copy.deepcopy(model)
    opt, other = half_masked(model), half_masked(twin)
    for seed in range(4):
        x, y = cases.vectors(seed=seed)
        cases.both_passes(other, twin, x, y)
        other.step()
        micro = list(zip(x.chunk(4), y.chunk(4), strict=True))
        opt.zero_grad()
        for a, b in micro:
            (F.cross_entropy(model(a), b) / 4).backward()
        with opt.perturbed():
            for a, b in micro:
                (F.cross_entropy(model(a), b) / 4).backward()
        opt.step()
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(twin), rtol=1e-10, atol=1e-12)


def test_clipping_goes_between_second_pass_and_step():
    model = cases.mlp()
    twin = copy.deepcopy(model)
    opt, other = (sparsesam.SAM(torch.optim.SGD(m.parameters(), lr=1.0), m, rho=0.1) for m in (model, twin))

    def clip(*_):
        nn.utils.clip_grad_norm_(twin.parameters(), 1e-3)

    other.base.register_step_pre_hook(clip)
    before = cases.weights_of(model)
    x, y = cases.vectors()
    cases.both_passes(opt, model, x, y)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    opt.step()
    moved = oracles.flat(cases.weights_of(model)) - oracles.flat(before)
    assert moved.norm().item() == pytest.approx(1e-3, rel=1e-3)
    other.step(cases.closure_for(twin, other, x, y))  # the same with a closure: a hook on the base optimizer
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(twin))


@pytest.mark.parametrize("on", ["wrapper", "base"])
@pytest.mark.filterwarnings("error")
def test_learning_rate_schedulers_on_wrapper_or_base(on):
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model, lr=1.0), model, rho=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(opt if on == "wrapper" else opt.base, step_size=1, gamma=0.5)
    x, y = cases.vectors()
    for expected in (1.0, 0.5, 0.25):
        assert opt.param_groups[0]["lr"] == opt.base.param_groups[0]["lr"] == expected
        opt.step(cases.closure_for(model, opt, x, y))
        scheduler.step()


def test_one_cycle_drives_momentum_through_wrapper():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.1)
    torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=10)
    assert opt.base.param_groups[0]["momentum"] == 0.95


def test_step_hooks_of_wrapper_and_base_fire_once_step():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.1)
    seen = []
    opt.register_step_pre_hook(lambda *_: seen.append("wrapper before"))
    opt.register_step_post_hook(lambda *_: seen.append("wrapper after"))
    opt.base.register_step_pre_hook(lambda *_: seen.append("base"))
    x, y = cases.vectors()
    opt.step(cases.closure_for(model, opt, x, y))
    assert seen == ["wrapper before", "base", "wrapper after"]


# ---- unusual models ------------------------------------------------------------------------------------


class Sometimes(nn.Module):
    """One branch in the first pass, another in the second, a third never."""

    def __init__(self):
        super().__init__()
        self.always, self.first, self.second, self.never = (nn.Linear(6, 3) for _ in range(4))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.always(x) + (self.first(x) if self.calls % 2 else self.second(x))


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_parameters_without_gradient_in_one_or_both_passes(sparsity):
    torch.manual_seed(0)
    model = Sometimes()
    opt = sparsesam.SSAM(cases.sgd(model, momentum=0), model, rho=0.5, mask=sparsesam.random_mask(sparsity=sparsity))
    x, y = cases.vectors(dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    opt.step(cases.closure_for(model, opt, x, y))
    changed = {name.split(".")[0] for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"always", "second"}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.embed(tokens).mean(1))


def test_tied_weights_are_perturbed_once():
    torch.manual_seed(0)
    model = Tied().double()
    twin = copy.deepcopy(model)
    base, twin_base = cases.sgd(model), cases.sgd(twin)
    opt = sparsesam.SAM(base, model, rho=0.2)
    tokens, y = torch.randint(0, 7, (8, 3)), torch.randint(0, 7, (8,))
    for _ in range(3):
        opt.step(cases.closure_for(model, opt, tokens, y))
        oracles.ssam_step(twin, twin_base, lambda m: F.cross_entropy(m(tokens), y), rho=0.2)
    assert list(opt.masks) == ["embed.weight"]
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(twin))


def test_sparse_embedding_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    dense = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3))
    dense.load_state_dict(model.state_dict())
    tokens, y = torch.randint(0, 9, (8, 2)), torch.randint(0, 3, (8,))
    for m in (model, dense):
        opt = sparsesam.SAM(torch.optim.SGD(m.parameters(), lr=0.1), m, rho=0.2)
        opt.step(cases.closure_for(m, opt, tokens, y))
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(dense))


def test_frozen_parameters_stay_and_unfrozen_ones_join_mask():
    model = cases.mlp()
    model[0].requires_grad_(False)
    opt = sparsesam.SSAM(cases.sgd(model), model, rho=0.1, mask=sparsesam.random_mask(sparsity=0.5))
    x, y = cases.vectors()
    before = model[0].weight.clone()
    opt.step(cases.closure_for(model, opt, x, y))
    assert "0.weight" not in opt.masks
    assert torch.equal(model[0].weight, before)
    model[0].requires_grad_(True)
    opt.step(cases.closure_for(model, opt, x, y))
    assert "0.weight" in opt.masks
    assert opt.sparsity == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("through", ["wrapper", "base"])
def test_parameter_group_added_later_participates(through):
    model = cases.mlp()
    base = torch.optim.SGD(model[2:].parameters(), lr=0.1)
    opt = sparsesam.SSAM(base, model, rho=0.1, mask=sparsesam.random_mask(sparsity=0.5))
    x, y = cases.vectors()
    opt.step(cases.closure_for(model, opt, x, y))
    (opt if through == "wrapper" else base).add_param_group({"params": model[0].parameters(), "lr": 0.01})
    opt.step(cases.closure_for(model, opt, x, y))
    assert opt.param_groups[1]["rho"] == 0.1
    assert "0.weight" in opt.masks


def test_compiled_and_data_parallel_wrappers_keep_names_of_model():
    model = cases.mlp()
    wrapped = torch.compile(model)
    opt = sparsesam.SAM(cases.sgd(wrapped), wrapped, rho=0.1)
    assert list(opt.masks) == [name for name, _ in model.named_parameters()]


# ---- normalization, exceptions, zero gradients -----------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("layer", [nn.BatchNorm1d, lambda n, **k: nn.InstanceNorm1d(n, track_running_stats=True, **k)])
def test_normalization_statistics_update_once_per_step(layer, momentum):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 3), layer(4, momentum=momentum), nn.Flatten(), nn.Linear(16, 3))
    twin = copy.deepcopy(model)
    opt = sparsesam.SAM(cases.sgd(model, lr=0.0), model, rho=0.5)
    for seed in range(3):
        torch.manual_seed(seed)
        x, y = torch.randn(8, 2, 6), torch.randint(0, 3, (8,))
        opt.step(cases.closure_for(model, opt, x, y))
        twin(x)
    assert cases.same_bits(list(model.buffers()), list(twin.buffers()))


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_weights_are_restored_when_second_pass_raises(sparsity, error):
    model = cases.convnet()
    opt = sparsesam.SSAM(cases.sgd(model), model, rho=5.0, mask=sparsesam.random_mask(sparsity=sparsity))
    x, y = cases.images()
    before = cases.weights_of(model)

    def interrupt():
        if opt.in_second_pass:
            raise error("in the second pass")

    with pytest.raises(error):
        opt.step(cases.closure_for(model, opt, x, y, then=interrupt))
    assert cases.same_bits(before, cases.weights_of(model))
    with pytest.raises(RuntimeError, match="needs a gradient"):
        opt.step()
    opt.step(cases.closure_for(model, opt, x, y))  # and training continues


@pytest.mark.parametrize("after", range(6))
def test_weights_are_restored_when_ascent_is_interrupted(after, monkeypatch):
    from sparsesam import perturbation as explicit

    model = cases.convnet()
    opt = half_masked(model)
    before = cases.weights_of(model)
    x, y = cases.images()
    F.cross_entropy(model(x), y).backward()
    calls = iter(range(100))
    original = torch.Tensor.scatter_

    def interrupted(*args):
        if next(calls) == after:
            original(*args)
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(explicit.Tensor, "scatter_", interrupted)
    with pytest.raises(KeyboardInterrupt), opt.perturbed():
        raise KeyboardInterrupt
    assert cases.same_bits(before, cases.weights_of(model))


def test_graph_kept_from_first_pass_raises():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.1)
    x, y = cases.vectors()
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"), opt.perturbed():
        loss.backward()


def scaled_closure(model, opt, x, y, factors):
    factors = iter(factors)
    return cases.closure_of(opt, lambda: F.cross_entropy(model(x), y) * next(factors))


def test_zero_ascent_gradient_is_counted_and_harmless():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.1)
    before = cases.weights_of(model)
    x, y = cases.vectors()
    opt.step(scaled_closure(model, opt, x, y, [0.0, 0.0]))
    assert cases.same_bits(before, cases.weights_of(model))
    assert (opt.skipped_ascents, opt.steps) == (1, 1)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_ascent_gradient_means_no_perturbation(bad):
    model = cases.mlp()
    twin = copy.deepcopy(model)
    opt = half_masked(model)
    x, y = cases.vectors()
    with pytest.warns(RuntimeWarning, match="skipped_ascents"):
        opt.step(scaled_closure(model, opt, x, y, [bad, 1.0]))
    plain = cases.sgd(twin)
    F.cross_entropy(twin(x), y).backward()
    plain.step()
    assert cases.same_bits(cases.weights_of(model), cases.weights_of(twin))
    assert (opt.skipped_ascents, opt.skipped_steps) == (1, 0)


def test_two_non_finite_gradients_leave_weights_unchanged():
    model = cases.mlp()
    opt = half_masked(model)
    before = cases.weights_of(model)
    x, y = cases.vectors()
    with pytest.warns(RuntimeWarning, match="skipped_steps"):
        opt.step(scaled_closure(model, opt, x, y, [torch.nan, torch.nan]))
    assert cases.same_bits(before, cases.weights_of(model))
    assert opt.skipped_steps == 1


def test_batch_for_a_mask_in_two_phases():
    """A mask that measures the current batch gets it from any of the three methods."""
    x, y = batch = cases.vectors()
    ends = []
    for way in ("step", "first_pass", "perturbed", "refresh_mask"):
        model = cases.mlp()
        mask = sparsesam.Mask(sparsesam.Fisher(loss_fn=F.cross_entropy), sparsesam.Unstructured(), 0.5)
        opt = sparsesam.SSAM(cases.sgd(model), model, rho=0.3, mask=mask)
        closure = cases.closure_for(model, opt, x, y)
        if way == "step":
            opt.step(closure, batch=batch)
        else:
            if way == "refresh_mask":
                opt.refresh_mask(now=True, batch=batch)
            if way == "perturbed":
                closure()
            else:
                with opt.first_pass(batch=batch):
                    closure()
            with opt.perturbed(batch=batch):
                closure()
            opt.step()
        ends.append(cases.weights_of(model))
    assert all(cases.same_bits(ends[0], end) for end in ends[1:])


def test_norm_of_the_last_update():
    model = cases.mlp()
    opt = sparsesam.ExtrapolatedSAM(cases.sgd(model), model)
    assert opt.last_update_norm is None
    before = cases.weights_of(model)
    opt.step(cases.closure_for(model, opt, *cases.vectors()))
    update = [now - then for now, then in zip(cases.weights_of(model), before, strict=True)]
    assert opt.last_update_norm == pytest.approx(float(torch.cat([one.flatten() for one in update]).norm()))
