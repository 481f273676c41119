"""Rare uses that once failed, each compared with two plain passes."""

import copy
import gc
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import sparsesam
from sparsesam.masks.samples import draw_batches
from tests.cases import take_step as step

X = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def seeded(make):
    torch.manual_seed(0)
    return make().double()


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def ssam(model, mask, **options):
    return sparsesam.SSAM(sgd(model), model, rho=0.5, mask=mask, norm="masked", **options)


def compare_engines(make, mask, loss_of):
    """The weights after some steps, with the engine and without."""
    ends = []
    for engine in (True, False):
        model = seeded(make)
        optimizer = ssam(model, mask, engine=engine)
        for _ in range(3):
            step(optimizer, lambda model=model: loss_of(model))
        ends.append(weights(model))
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


# ---- normalization statistics in steps of one pass ---------------------------------------------------------


def normalized():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


@pytest.mark.parametrize(
    "options", [{"kind": sparsesam.MomentumSAM}, {"every": 2, "off_steps": "reuse"}, {"every": 2}, {}]
)
@pytest.mark.parametrize("two_phase", [False, True])
def test_statistics_update_once_in_every_step(options, two_phase):
    model = seeded(normalized)
    optimizer = {"kind": sparsesam.SAM, **options}["kind"](
        sgd(model, momentum=0.9), model, **{key: value for key, value in options.items() if key != "kind"}
    )
    for count in range(1, 5):
        if two_phase:
            if optimizer.needs_first_pass:
                model(X).square().sum().backward()
            with optimizer.perturbed():
                model(X).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            step(optimizer, lambda: model(X).square().sum())
        assert model[1].num_batches_tracked == count


@pytest.mark.parametrize("options", [{"kind": sparsesam.MomentumSAM}, {"every": 2, "off_steps": "reuse"}, {"every": 2}])
def test_statistics_update_once_where_loop_always_runs_both_passes(options):
    model = seeded(normalized)
    optimizer = {"kind": sparsesam.SAM, **options}["kind"](
        sgd(model, momentum=0.9), model, **{key: value for key, value in options.items() if key != "kind"}
    )
    for count in range(1, 5):
        with optimizer.first_pass():
            model(X).square().sum().backward()
        with optimizer.perturbed():
            model(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert model[1].num_batches_tracked == count


# ---- ascent_fraction -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"rho": 0.0}, {"mask": sparsesam.random_mask(sparsity=1.0), "rho": 0.5}])
def test_no_perturbation_equals_base_optimizer_with_ascent_fraction(options):
    model = seeded(lambda: nn.Linear(4, 1))
    plain = copy.deepcopy(model)
    kind = sparsesam.SSAM if "mask" in options else sparsesam.SAM
    optimizer = kind(sgd(model), model, ascent_fraction=0.25, **options)

    def closure(batch):
        optimizer.zero_grad()
        loss = model(batch[0]).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure, batch=(X,))
    base = sgd(plain)
    plain(X).square().mean().backward()
    base.step()
    assert torch.equal(weights(model), weights(plain))


def test_ascent_fraction_needs_closure():
    model = seeded(lambda: nn.Linear(4, 1))
    optimizer = sparsesam.SAM(sgd(model), model, ascent_fraction=0.25)
    model(X).square().mean().backward()
    with pytest.raises(ValueError, match=r"ascent_fraction=0\.25 needs opt\.step"), optimizer.perturbed():
        pass


# ---- the engine ------------------------------------------------------------------------------------------------


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b(self.a(x).relu())


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(3, 4))
        self.k = nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, x):
        h = F.linear(input=x, weight=self.w)
        h = F.conv1d(input=h[:, None], weight=self.k)
        return F.linear(weight=self.v, input=h)


def half_of_rows(make):
    model = make()
    masks = {}
    for name, parameter in model.named_parameters():
        masks[name] = torch.zeros_like(parameter, dtype=torch.bool)
        masks[name][: (len(parameter) + 1) // 2] = True
    return sparsesam.fixed_mask(masks)


def test_keyword_arguments():
    compare_engines(Named, half_of_rows(Named), lambda model: model(X).square().sum())
    model = seeded(Named)
    step(implicit(model, sparsesam.fixed_mask("v")), lambda: model(X).square().sum())


def test_single_sample_without_batch_dimension():
    compare_engines(TwoParts, half_of_rows(TwoParts), lambda model: model(X[0]).square().sum())


class WithFeatures(TwoParts):
    def forward(self, x):
        h = self.a(x)
        return h, self.b(h.relu())


def test_unperturbed_output_may_have_its_own_loss():
    def loss_of(model):
        features, scores = model(X)
        features.retain_grad()
        features.square().sum().backward(retain_graph=True)
        return scores.square().sum()

    compare_engines(WithFeatures, sparsesam.fixed_mask("b.*"), loss_of)


def moves_in_a_step(optimizer, model, weight):
    """Whether the second pass sees another value of the weight than the first."""
    seen = []

    def loss_of():
        seen.append(weight.detach().clone())
        return model(X).square().sum()

    step(optimizer, loss_of)
    return not torch.equal(seen[0], seen[1])


def test_group_added_later_is_perturbed():
    model = seeded(TwoParts)
    optimizer = sparsesam.SAM(torch.optim.SGD(model.b.parameters(), 0.1), model, rho=0.5)
    step(optimizer, lambda: model(X).square().sum())
    optimizer.add_param_group({"params": list(model.a.parameters())})
    assert moves_in_a_step(optimizer, model, model.a.weight)


def test_group_enabled_later_is_perturbed_at_once():
    model = seeded(TwoParts)
    groups = [{"params": list(model.a.parameters()), "perturb": False}, {"params": list(model.b.parameters())}]
    optimizer = sparsesam.SAM(torch.optim.SGD(groups, 0.1), model, rho=0.5)
    step(optimizer, lambda: model(X).square().sum())
    optimizer.param_groups[0]["perturb"] = True
    assert moves_in_a_step(optimizer, model, model.a.weight)


def test_no_activations_are_kept_after_step():
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            output = super().forward(x)
            seen.append(weakref.ref(output))
            return output

    model = seeded(TwoParts)
    model.a = Watched(model.a.in_features, model.a.out_features).to(X.dtype)
    optimizer = ssam(model, sparsesam.fixed_mask("b.*"))
    for _ in range(2):
        step(optimizer, lambda: model(X).square().sum())
    gc.collect()
    assert optimizer.savings().reused > 0
    assert [output() for output in seen] == [None] * 4


class Noisy(TwoParts):
    def forward(self, x):
        self.noise = torch.rand(4, dtype=x.dtype)
        return self.b((self.a(x) * self.noise).relu())


def test_closure_that_raised_leaves_no_state():
    model = seeded(Noisy)
    optimizer = ssam(model, sparsesam.fixed_mask("b.*"))
    step(optimizer, lambda: model(X).square().sum())

    def failing():
        model(X)
        raise KeyError("no more data")

    with pytest.raises(KeyError):
        optimizer.step(failing)
    noise = []

    def loss_of():
        loss = model(X).square().sum()
        noise.append(model.noise)
        return loss

    step(optimizer, loss_of)
    assert torch.equal(noise[0], noise[1])


def test_forwards_between_steps_are_unaffected():
    model = seeded(TwoParts)
    optimizer = ssam(model, sparsesam.fixed_mask("b.*"))
    step(optimizer, lambda: model(X).square().sum())
    optimizer.zero_grad()
    model(X).square().sum().backward()
    assert model.a.weight.grad is not None


# ---- loops with perturbed() ------------------------------------------------------------------------------------


def two_phases(optimizer, loss_of, *, first_pass=True):
    optimizer.zero_grad()
    with optimizer.first_pass() if first_pass else nullcontext():
        loss_of().backward()
    with optimizer.perturbed():
        loss_of().backward()
    optimizer.step()


@pytest.mark.parametrize("first_pass", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda model, optimizer: optimizer.refresh_mask(),
        lambda model, optimizer: optimizer.refresh_mask(now=True),
        lambda model, optimizer: optimizer.param_groups[0].update(perturb=False),
        lambda model, optimizer: model.a.requires_grad_(False),
    ],
)
def test_changes_between_steps_of_loop(change, first_pass):
    ends = []
    for engine in (True, False):
        model = seeded(TwoParts)
        optimizer = ssam(model, sparsesam.random_mask(sparsity=0.5, pattern="filter"), engine=engine)
        two_phases(optimizer, lambda model=model: model(X).square().sum(), first_pass=first_pass)
        change(model, optimizer)
        two_phases(optimizer, lambda model=model: model(X).square().sum(), first_pass=first_pass)
        ends.append(weights(model))
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-11)


def test_layer_unfrozen_between_steps_is_perturbed():
    for first_pass in (True, False):
        model = seeded(TwoParts)
        model.a.requires_grad_(False)
        optimizer = ssam(model, sparsesam.random_mask(sparsity=0, pattern="filter"))
        two_phases(optimizer, lambda model=model: model(X).square().sum(), first_pass=first_pass)
        model.a.requires_grad_(True)
        optimizer.zero_grad()
        with optimizer.first_pass() if first_pass else nullcontext():
            model(X).square().sum().backward()
        before = model.a.weight.detach().clone()
        with optimizer.perturbed():
            assert not torch.equal(before, model.a.weight)
            model(X).square().sum().backward()
        optimizer.step()


def test_plain_base_step_between_two_phase_steps_updates_every_layer():
    model = seeded(TwoParts)
    optimizer = ssam(model, sparsesam.fixed_mask("b.*"))
    two_phases(optimizer, lambda: model(X).square().sum())
    before = model.a.weight.detach().clone()
    optimizer.zero_grad()
    model(X).square().sum().backward()
    optimizer.base.step()
    assert not torch.equal(before, model.a.weight)


def test_second_optimizer_on_other_layers():
    ends = []
    for engine in (True, False):
        model = seeded(TwoParts)
        mask = sparsesam.fixed_mask("b.*")
        optimizer = sparsesam.SSAM(
            torch.optim.SGD(model.b.parameters(), 0.1), model, rho=0.5, mask=mask, norm="masked", engine=engine
        )
        other = torch.optim.SGD(model.a.parameters(), 0.1)
        for _ in range(3):
            other.zero_grad()
            step(optimizer, lambda model=model: model(X).square().sum())
            other.step()
        ends.append(weights(model))
        assert (optimizer.savings().reused > 0) == engine
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


def test_gradients_outside_optimizer_are_those_of_second_pass():
    """As if the closure had been called once, at w + e; what the user accumulates there is kept."""
    for engine in (True, False):
        model = seeded(TwoParts)
        mask = sparsesam.fixed_mask("b.*")
        optimizer = sparsesam.SSAM(
            torch.optim.SGD(model.b.parameters(), 0.1), model, rho=0.5, mask=mask, norm="masked", engine=engine
        )
        model.a.weight.grad = torch.ones_like(model.a.weight)
        seen = []

        def loss_of(model=model, optimizer=optimizer, seen=seen):
            loss = model(X).square().sum()
            if optimizer.in_second_pass:
                seen.append(torch.autograd.grad(loss, model.a.weight, retain_graph=True)[0])
            return loss

        step(optimizer, loss_of)
        torch.testing.assert_close(model.a.weight.grad, seen[0] + 1, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clears", ["before the block", "in the block", "never"])
def test_gradients_outside_optimizer_are_those_of_second_pass_in_two_phases(clears):
    """Whether the first backward leaves them out or not."""
    ends = []
    for narrowed in (False, True):
        model = seeded(TwoParts)
        optimizer = sparsesam.SSAM(
            torch.optim.SGD(model.b.parameters(), 0.1), model, rho=0.5, mask=sparsesam.fixed_mask("b.*"), norm="masked"
        )
        other = torch.optim.SGD(model.a.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            if clears == "before the block":
                other.zero_grad()
            with optimizer.first_pass():
                if clears == "in the block":
                    other.zero_grad(set_to_none=False)
                loss = model(X).square().sum()
                optimizer.backward(loss) if narrowed else loss.backward()
            with optimizer.perturbed():
                model(X).square().sum().backward()
            optimizer.step()
            other.step()
        ends.append(weights(model))
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


def test_mask_that_changes_between_phases_raises():
    model = seeded(TwoParts)
    optimizer = ssam(model, sparsesam.random_mask(sparsity=0.5, pattern="filter"))
    two_phases(optimizer, lambda: model(X).square().sum())
    before = weights(model)
    optimizer.zero_grad()
    with optimizer.first_pass():
        optimizer.backward(model(X).square().sum())
    optimizer.refresh_mask()
    with pytest.raises(RuntimeError, match="before first_pass"), optimizer.perturbed():
        pass
    assert torch.equal(weights(model), before)


# ---- implicit ascent -------------------------------------------------------------------------------------------


def implicit(model, mask):
    return ssam(model, mask, ascent="implicit")


def test_implicit_gradient_stops_at_unperturbed_last_layer():
    model = seeded(TwoParts)
    plain = copy.deepcopy(model)
    optimizer = implicit(model, sparsesam.fixed_mask("a.*"))
    step(optimizer, lambda: model(X).square().sum())
    base = sgd(plain)
    plain(X).square().sum().backward()
    base.step()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-12, atol=1e-12)
    assert optimizer.skipped_ascents == 1


def test_implicit_in_evaluation_mode_is_implicit():
    ends = []
    for training in (True, False):
        model = seeded(TwoParts).train(training)  # nothing in it depends on the mode
        optimizer = implicit(model, half_of_rows(TwoParts))
        for _ in range(3):
            step(optimizer, lambda model=model: model(X).square().sum())
        ends.append(weights(model))
    assert torch.equal(*ends)


def test_implicit_rejects_first_pass_without_its_weights():
    model = seeded(TwoParts)
    optimizer = implicit(model, half_of_rows(TwoParts))
    step(optimizer, lambda: model(X).square().sum())  # the one that makes the mask
    before = weights(model)
    with pytest.raises(RuntimeError, match="in torch's linear and convolution functions"):
        step(optimizer, lambda: ((X @ model.a.weight.t()).relu() @ model.b.weight.t()).square().sum())
    assert torch.equal(weights(model), before)


class Product(TwoParts):
    def forward(self, x):
        return self.b((x @ self.a.weight.t() + self.a.bias).relu())


def test_implicit_reports_where_it_was_explicit():
    model = seeded(Product)
    optimizer = implicit(model, half_of_rows(TwoParts))
    with pytest.warns(RuntimeWarning, match=r"explicit for a\.weight$"):
        step(optimizer, lambda: model(X).square().sum())


# ---- masks, checkpoints, phases ----------------------------------------------------------------------------------


def test_budget_needs_masked_norm():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    mask = sparsesam.budget_mask(model, torch.randn(8, 4), budget=1.9)
    with pytest.raises(ValueError, match='norm must be "masked" with BudgetMask, got "full"'):
        sparsesam.SSAM(sgd(model), model, rho=0.1, mask=mask)


def test_samples_follow_sampler_of_loader():
    data = TensorDataset(torch.arange(100.0)[:, None], torch.zeros(100))
    for loader in (
        DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(range(16))),
        DataLoader(data, batch_sampler=[[0, 1, 2], [3, 4, 15]]),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            drawn = torch.cat(
                [x for x, _ in draw_batches(loader, 50, generator=torch.Generator().manual_seed(0), chunk=8)]
            )
        assert drawn.max() < 16
        assert len(drawn.unique()) == len(drawn) >= 6


def test_loader_of_ready_batches_is_stream():
    ready = [(torch.ones(4, 1), torch.zeros(4))] * 3
    loader = DataLoader(ready, batch_size=None)
    batches = list(draw_batches(loader, 8, generator=torch.Generator(), chunk=8))
    assert sum(len(x) for x, _ in batches) == 8


@pytest.mark.parametrize("mask", [sparsesam.fixed_mask("head.*"), sparsesam.fixed_mask(types=(nn.Linear,))])
def test_tied_weight_is_found_by_each_of_its_names(mask):
    model = nn.ModuleDict({"table": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["table"].weight
    optimizer = sparsesam.SSAM(sgd(model), model, rho=0.1, mask=mask)
    step(optimizer, lambda: model["head"](model["table"](torch.arange(5))).square().sum())
    assert optimizer.sparsity == 0


def test_base_checkpoint_resets_state():
    model = seeded(TwoParts)
    schedule = sparsesam.Cosine(10)
    optimizer = sparsesam.SSAM(
        sgd(model), model, rho=0.3, mask=sparsesam.random_mask(sparsity=0.5), rho_schedule=schedule
    )
    first = optimizer.param_groups[0]["rho"]
    for _ in range(8):
        step(optimizer, lambda: model(X).square().sum())
    assert optimizer.param_groups[0]["rho"] < first
    with pytest.warns(UserWarning, match="masks are reset"):
        optimizer.load_state_dict(sgd(model).state_dict())
    assert (optimizer.steps, optimizer.masks, optimizer.param_groups[0]["rho"]) == (0, {}, 0.3)


def test_abandoned_step_does_not_make_next_one_plain():
    model = seeded(TwoParts)
    optimizer = sparsesam.SAM(sgd(model), model)
    model(X).square().sum().backward()
    with optimizer.perturbed():
        model(X).square().sum().backward()
    optimizer.zero_grad()  # the user abandons this step
    model(X).square().sum().backward()
    with pytest.raises(RuntimeError, match=r"step\(\) needs a gradient at w \+ e"):
        optimizer.step()


def test_later_wrapper_around_same_base_has_its_own_options():
    model = seeded(lambda: nn.Linear(4, 2))
    base = torch.optim.SGD([{"params": p} for p in model.parameters()], lr=0.1)
    base.param_groups[0]["rho"] = 0.7  # the user's
    halved = sparsesam.SAM(base, model, rho=0.3, adaptive=True, rho_schedule=lambda step: 0.5)
    step(halved, lambda: model(X).square().mean())
    assert [group["rho"] for group in halved.param_groups] == [0.35, 0.15]
    opt = sparsesam.SAM(base, model, rho=0.1)
    assert [group["rho"] for group in opt.param_groups] == [0.7] + [0.1] * (len(opt.param_groups) - 1)
    assert not any(group["adaptive"] for group in opt.param_groups)
