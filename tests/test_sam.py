"""The step: its three ways give the same result, each pass runs once, nothing is left behind."""

from __future__ import annotations

import copy
import pickle
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import sparsesam
from tests import cases, oracles


def parts():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2))
    return nn.ModuleDict({"body": body, "head": nn.Linear(4 * 36, 3)}).double()


def outputs(model, x):
    return model["head"](model["body"](x).flatten(1))


def loss_of(model, x, y):
    return F.cross_entropy(outputs(model, x), y)


def by_minimize(opt, model, x, y):
    return opt.minimize(lambda: loss_of(model, x, y))


def by_closure(opt, model, x, y):
    return opt.step(cases.closure_of(opt, lambda: loss_of(model, x, y)))


def in_two_phases(opt, model, x, y):
    opt.zero_grad()
    with opt.first_pass():
        loss = loss_of(model, x, y)
        opt.backward(loss)
    with opt.perturbed():
        loss_of(model, x, y).backward()
    opt.step()
    return loss.detach()


def in_two_phases_with_every_gradient(opt, model, x, y):
    opt.zero_grad()
    with opt.first_pass():
        loss = loss_of(model, x, y)
        loss.backward()
    with opt.perturbed():
        loss_of(model, x, y).backward()
    opt.step()
    return loss.detach()


WAYS = [by_minimize, by_closure, in_two_phases, in_two_phases_with_every_gradient]

OPTIMIZERS = {
    "SAM": lambda model: sparsesam.SAM(cases.sgd(model), model, rho=0.3),
    "last layer": lambda model: cases.ssam(model),
    "last layer, full norm": lambda model: cases.ssam(model, norm="full"),
    "last layer, Adam, ASAM": lambda model: sparsesam.SSAM(
        torch.optim.AdamW(model.parameters()), model, 0.3, mask=sparsesam.fixed_mask("head.*"), adaptive=True
    ),
    "half": lambda model: cases.ssam(model, cases.half_masks(model)),
    "SSAM-D": lambda model: cases.ssam(model, sparsesam.dynamic_mask(sparsity=0.5, refresh=2)),
    "every other step": lambda model: cases.ssam(model, every=2, off_steps="reuse"),
    "from the third step": lambda model: cases.ssam(model, start=2),
    "MomentumSAM": lambda model: sparsesam.MomentumSAM(cases.sgd(model), model),
    "ExtrapolatedSAM": lambda model: sparsesam.ExtrapolatedSAM(cases.sgd(model), model, 3.0),
    "GSAM": lambda model: sparsesam.GSAM(cases.sgd(model), model, 0.3),
    "WSAM": lambda model: sparsesam.WSAM(cases.sgd(model), model, 0.3, mask=sparsesam.fixed_mask("head.*")),
    "LookSAM": lambda model: sparsesam.LookSAM(cases.sgd(model), model, 0.3, every=2),
    "FriendlySAM": lambda model: sparsesam.FriendlySAM(
        cases.sgd(model), model, 0.3, mask=sparsesam.fixed_mask("head.*"), norm="masked"
    ),
    "ZSharp": lambda model: sparsesam.ZSharp(cases.sgd(model), model, 0.3),
    "ESAM": lambda model: sparsesam.ESAM(cases.sgd(model), model, 0.3),
    "by layer": lambda model: sparsesam.SAM(cases.sgd(model), model, 0.3, radius="layer", adaptive="layer"),
    "by element": lambda model: sparsesam.SAM(cases.sgd(model), model, 0.01, radius="element"),
}


def trained(make, way, steps=5, **options):
    model = parts()
    opt = make(model, **options)
    torch.manual_seed(1)
    losses = []
    for seed in range(steps):
        x, y = cases.images(dtype=torch.float64, seed=seed)
        if way in (in_two_phases, in_two_phases_with_every_gradient) and not opt.needs_first_pass:
            with opt.perturbed():
                losses.append(loss_of(model, x, y))
                losses[-1].backward()
            opt.step()
        else:
            losses.append(way(opt, model, x, y))
    return opt, [*model.state_dict().values(), *map(torch.Tensor.detach, losses), torch.get_rng_state()]


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_ways_give_the_same_bits(name, way):
    _, expected = trained(OPTIMIZERS[name], by_minimize)
    _, found = trained(OPTIMIZERS[name], way)
    assert cases.same_bits(found, expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{}, {"norm": "full"}, {"every": 2}])
def test_leaving_out_work_changes_no_bit(way, options):
    results = [trained(cases.ssam, way, engine=engine, **options) for engine in (True, False)]
    assert cases.same_bits(results[0][1], results[1][1])
    assert (results[0][0].savings().reused > 0, results[1][0].savings().reused) == (True, 0)


def test_minimize_equals_oracle():
    model = cases.mlp()
    twin = copy.deepcopy(model)
    opt, base = sparsesam.SAM(cases.sgd(model), model, rho=0.2), cases.sgd(twin)
    for seed in range(5):
        x, y = cases.vectors(seed=seed)
        loss = opt.minimize(lambda x=x, y=y: F.cross_entropy(model(x), y))
        expected = oracles.ssam_step(twin, base, lambda m, x=x, y=y: F.cross_entropy(m(x), y), rho=0.2)
        torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(twin), rtol=1e-12, atol=1e-12)


# ---- minimize ----------------------------------------------------------------------------------------------------


def test_auxiliary_outputs_are_those_of_the_first_pass_and_detached():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.5)
    x, y = cases.vectors()
    expected = model(x).detach()

    def loss():
        output = model(x)
        return F.cross_entropy(output, y), {"output": output, "note": "kept"}

    value, aux = opt.minimize(loss, has_aux=True)
    assert torch.equal(value, F.cross_entropy(expected, y))
    assert torch.equal(aux["output"], expected)
    assert not aux["output"].requires_grad
    assert aux["note"] == "kept"


def test_list_of_functions_accumulates():
    model, twin = cases.mlp(), cases.mlp()
    opt, other = cases.ssam(model, "4.*"), cases.ssam(twin, "4.*")
    for seed in range(3):
        x, y = cases.vectors(16, seed=seed)
        micro = [lambda a=a, b=b: F.cross_entropy(model(a), b) / 4 for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
        loss = opt.minimize(micro)
        expected = other.minimize(lambda x=x, y=y: F.cross_entropy(twin(x), y))
        torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(twin), rtol=1e-10, atol=1e-12)
    assert opt.savings().gradients > 0
    assert "several functions" in opt.savings().ended


def test_batch_is_given_to_a_function_with_a_parameter():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.3, ascent_fraction=0.25)
    sizes = []

    def loss(batch):
        sizes.append(len(batch[1]))
        return F.cross_entropy(model(batch[0]), batch[1])

    opt.minimize(loss, batch=cases.vectors(16))
    assert sizes == [4, 16]


@pytest.mark.parametrize("make", [cases.ssam, lambda m: sparsesam.GSAM(cases.sgd(m), m, 0.1)])
def test_scaler_scales_both_passes_and_unscales_before_the_update(make):
    model, twin = parts().float(), parts().float()
    opt, other = make(model), make(twin)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    norms = []
    opt.base.register_step_pre_hook(lambda *_: norms.append(model["head"].weight.grad.norm().item()))
    other.base.register_step_pre_hook(lambda *_: norms.append(twin["head"].weight.grad.norm().item()))
    for seed in range(3):
        x, y = cases.images(seed=seed)
        torch.manual_seed(seed)
        opt.minimize(lambda x=x, y=y: loss_of(model, x, y), scaler=scaler)
        scaler.update()
        torch.manual_seed(seed)
        other.minimize(lambda x=x, y=y: loss_of(twin, x, y))
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(twin), rtol=1e-4, atol=1e-6)
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_step_skipped_by_scaler_is_not_taken():
    model = cases.mlp(torch.float32)
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, y = cases.vectors(dtype=torch.float32)
    before = cases.weights_of(model)
    with pytest.warns(RuntimeWarning, match="skipped_ascents"):
        opt.minimize(lambda: F.cross_entropy(model(x), y) * torch.inf, scaler=scaler)
    scaler.update()
    assert cases.same_bits(before, cases.weights_of(model))
    assert (opt.steps, scaler.get_scale()) == (0, 2.0**9)
    opt.minimize(lambda: F.cross_entropy(model(x), y), scaler=scaler)
    assert opt.steps == 1


def backward_inside(model, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (backward_inside, RuntimeError, "must not call backward"),
        (lambda model, x, y: model(x), ValueError, "loss must return one number"),
        (lambda model, x, y: None, ValueError, "loss must return one number, got NoneType"),
    ],
)
def test_function_that_is_no_loss_raises_and_changes_nothing(loss, error, words):
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model)
    before = cases.weights_of(model)
    with pytest.raises(error, match=words):
        opt.minimize(lambda: loss(model, *cases.vectors()))
    assert cases.same_bits(before, cases.weights_of(model))
    assert opt.steps == 0


@pytest.mark.parametrize("loss", [3, [], [None]])
def test_loss_that_is_no_function_raises(loss):
    model = cases.mlp()
    with pytest.raises(TypeError, match="loss must be a function"):
        sparsesam.SAM(cases.sgd(model), model).minimize(loss)


@pytest.mark.filterwarnings("error")
def test_minimize_is_a_step_for_schedulers_and_hooks():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
    seen = []
    opt.register_step_pre_hook(lambda *_: seen.append("before"))
    opt.register_step_post_hook(lambda *_: seen.append("after"))
    opt.minimize(lambda: F.cross_entropy(model(cases.vectors()[0]), cases.vectors()[1]))
    scheduler.step()
    assert seen == ["before", "after"]


@pytest.mark.parametrize("way", [by_minimize, by_closure])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_functions_are_called_once_per_pass(name, way):
    model = parts()
    opt = OPTIMIZERS[name](model)
    calls = []
    handle = model["head"].register_forward_hook(lambda *_: calls.append(opt.in_second_pass))
    for seed in range(4):
        calls.clear()
        expected = [False, True] if opt.needs_first_pass else [False]
        way(opt, model, *cases.images(dtype=torch.float64, seed=seed))
        assert calls == expected
    handle.remove()


# ---- what is left out ----------------------------------------------------------------------------------------------


def test_savings_say_what_was_left_out():
    model = parts()
    opt = cases.ssam(model)
    assert "no step taken yet" in str(opt.savings())
    by_minimize(opt, model, *cases.images(dtype=torch.float64))
    savings = opt.savings()
    body, total = (sum(p.numel() for p in m.parameters()) for m in (model["body"], model))
    assert savings.gradients == pytest.approx(body / total)
    assert 0 < savings.reused <= savings.operations
    assert "reads head.bias, which is perturbed" in savings.ended
    assert len(str(savings).splitlines()) == 3


def test_first_backward_computes_ascent_inputs_only():
    model = parts()
    opt = cases.ssam(model)
    assert opt.ascent_inputs is None
    x, y = cases.images(dtype=torch.float64)
    with opt.first_pass():
        assert [id(p) for p in opt.ascent_inputs] == [id(p) for p in model["head"].parameters()]
        opt.backward(loss_of(model, x, y))
    assert [p.grad is None for p in model["body"].parameters()] == [True] * 4
    with opt.perturbed():
        loss_of(model, x, y).backward()
        assert all(p.grad is not None for p in model.parameters())
    opt.step()


def test_backward_outside_of_first_pass_is_plain():
    model = parts()
    opt = cases.ssam(model)
    opt.backward(loss_of(model, *cases.images(dtype=torch.float64)))
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant):
    def checkpointed(model, x, y):
        h = torch.utils.checkpoint.checkpoint(model["body"], x.requires_grad_(), use_reentrant=reentrant)
        return F.cross_entropy(model["head"](h.flatten(1)), y)

    ends = []
    for engine in (True, False):
        model = parts()
        opt = cases.ssam(model, engine=engine)
        torch.manual_seed(1)
        for seed in range(3):
            x, y = cases.images(dtype=torch.float64, seed=seed)
            opt.minimize(lambda model=model, x=x, y=y: checkpointed(model, x, y))
        ends.append([*cases.weights_of(model), torch.get_rng_state()])
    assert cases.same_bits(*ends)


def test_parameters_of_another_optimizer_get_the_gradient_of_the_second_pass():
    model = parts()
    base = torch.optim.SGD(model["head"].parameters(), lr=0.1)
    opt = sparsesam.SAM(base, model, rho=0.3)
    seen = []

    def loss():
        value = loss_of(model, *cases.images(dtype=torch.float64))
        if opt.in_second_pass:
            seen.append(torch.autograd.grad(value, model["body"][0].weight, retain_graph=True)[0])
        return value

    opt.minimize(loss)
    assert torch.equal(model["body"][0].weight.grad, seen[0])


# ---- nothing is left behind ----------------------------------------------------------------------------------------


def traces(model):
    """Everything that could stay behind on the model and in torch."""
    hooks = [
        len(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name.endswith("hooks") and isinstance(value, dict)
    ]
    gradient_hooks = [p._backward_hooks for p in model.parameters()]
    attributes = [sorted(vars(module)) for module in model.modules()]
    modes = len(_get_current_function_mode_stack()), len(_get_current_dispatch_mode_stack())
    return hooks, gradient_hooks, attributes, modes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("failing_pass", [1, 2])
@pytest.mark.parametrize("name", ["SAM", "last layer", "half", "GSAM"])
def test_nothing_of_ours_stays_after_a_step(name, failing_pass, error, way):
    model = parts()
    opt = OPTIMIZERS[name](model)
    x, y = cases.images(dtype=torch.float64)
    way(opt, model, x, y)
    before, weights = traces(model), cases.weights_of(model)
    calls = []

    def fail(*_):
        calls.append(1)
        if error is not None and len(calls) == failing_pass:
            raise error

    handle = model["head"].register_forward_hook(fail)
    try:
        way(opt, model, x, y)
    except (ZeroDivisionError, KeyboardInterrupt):
        assert cases.same_bits(weights, cases.weights_of(model))
    handle.remove()
    assert traces(model) == before
    way(opt, model, x, y)


def test_few_files_of_ours_are_entered():
    """A reader of a step opens these, and no others."""

    def files(opt, model):
        seen = set()
        x, y = cases.images(dtype=torch.float64)
        for _ in range(2):
            by_minimize(opt, model, x, y)

        def note(frame, event, _):
            name = frame.f_code.co_filename
            if "sparsesam" in name and event == "call":
                seen.add(name.rpartition("sparsesam/")[2])

        sys.setprofile(note)
        try:
            by_minimize(opt, model, x, y)
        finally:
            sys.setprofile(None)
        return sorted(seen)

    model = parts()
    dense = files(OPTIMIZERS["SAM"](model), model)
    assert len(dense) <= 7, dense
    last = files(cases.ssam(model), model)
    assert len(last) <= 10, " ".join(last)


# ---- surprises that once were --------------------------------------------------------------------------------------


def test_state_dict_of_perturbed_weights_warns():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.1)
    F.cross_entropy(model(cases.vectors()[0]), cases.vectors()[1]).backward()
    with opt.perturbed(), pytest.warns(RuntimeWarning, match="holds the perturbed weights"):
        model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.state_dict()


@pytest.mark.filterwarnings("error")
def test_copies_made_in_a_pass_are_plain_models():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.1)
    F.cross_entropy(model(cases.vectors()[0]), cases.vectors()[1]).backward()
    with opt.perturbed():
        copied, pickled = copy.deepcopy(model), pickle.dumps(model)
    assert b"sparsesam" not in pickled
    for twin in (copied, pickle.loads(pickled)):
        twin.state_dict()


def test_printed_optimizer_names_method_and_base():
    model = cases.mlp()
    text = repr(cases.ssam(model, "4.*"))
    assert text.startswith("SSAM(rho=0.3, ")
    assert "SGD" in text
    assert "sparsesam" not in text


def test_one_pass_step_after_a_skipped_one_keeps_the_statistics():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    opt = sparsesam.MomentumSAM(cases.sgd(model), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    x, y = cases.vectors(dtype=torch.float32)
    for count, factor in enumerate((1.0, torch.inf, 1.0), start=1):
        with opt.perturbed():
            scaler.scale(F.cross_entropy(model(x), y) * factor).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        assert model[1].num_batches_tracked == count


@pytest.mark.parametrize("then", [lambda _: None, lambda opt: opt.state_dict(), lambda opt: opt.refresh_mask()])
@pytest.mark.parametrize("pattern", ["unstructured", "filter"])
def test_extrapolation_after_a_change_of_dtype(pattern, then):
    model = cases.mlp(torch.float32)
    mask = sparsesam.random_mask(sparsity=0.5, pattern=pattern)
    opt = sparsesam.ExtrapolatedSAM(torch.optim.SGD(model.parameters(), lr=0.1), model, 3.0, mask=mask)
    x, y = cases.vectors(dtype=torch.float32)
    opt.minimize(lambda: F.cross_entropy(model(x), y))
    model.double()
    then(opt)
    for _ in range(2):
        opt.minimize(lambda: F.cross_entropy(model(x.double()), y))
    assert opt.steps == 3


def test_closure_without_backward_is_skipped_and_not_counted():
    """As in the last epoch of Lightning's StochasticWeightAveraging."""
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.1)
    x, y = cases.vectors()
    opt.step(cases.closure_for(model, opt, x, y))
    before, calls = cases.weights_of(model), []

    def closure():
        calls.append(opt.zero_grad())
        return F.cross_entropy(model(x), y)

    with pytest.warns(RuntimeWarning, match="computed no gradient"):
        opt.step(closure)
    assert cases.same_bits(before, cases.weights_of(model))
    assert (len(calls), opt.steps, opt.skipped_steps) == (1, 1, 1)


@pytest.mark.parametrize("ended_by", ["not finite", "error"])
def test_sharpness_term_of_a_step_not_taken_is_dropped(ended_by):
    """The next step, a plain one, once applied it."""
    model = cases.mlp()
    opt = sparsesam.WSAM(cases.sgd(model), model, every=2)
    x, y = cases.vectors()
    if ended_by == "not finite":
        with pytest.warns(RuntimeWarning, match="not finite"):
            opt.minimize(lambda: F.cross_entropy(model(x), y) * float("nan"))
    else:
        hook = opt.base.register_step_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            opt.minimize(lambda: F.cross_entropy(model(x), y))
        hook.remove()
        opt.param_groups[0]["rho"] = 0.0
    plain = copy.deepcopy(model)
    opt.minimize(lambda: F.cross_entropy(model(x), y))
    base = cases.sgd(plain)
    F.cross_entropy(plain(x), y).backward()
    base.step()
    assert cases.same_bits(cases.weights_of(model), cases.weights_of(plain))


@pytest.mark.parametrize(
    "step", [lambda opt: opt.minimize(lambda _: 1 / 0, batch=0), lambda opt: opt.step(lambda _: 1 / 0, batch=0)]
)
def test_two_ways_in_one_step_raise_before_the_closure_runs(step):
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model)
    cases.both_passes(opt, model, *cases.vectors())
    with pytest.raises(RuntimeError, match="already exists"):
        step(opt)


def test_state_is_not_loaded_inside_a_pass():
    """It would drop what restores the weights."""
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model)
    x, y = cases.vectors()
    before, state = cases.weights_of(model), opt.state_dict()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="inside a pass"), opt.perturbed():
        opt.load_state_dict(state)
    assert cases.same_bits(before, cases.weights_of(model))


def test_refresh_asked_for_again_in_the_same_step_does_not_stop_two_phases():
    model = cases.mlp()
    last = [name for name, _ in model.named_parameters()][-1]
    opt = cases.ssam(model, last)
    x, y = cases.vectors()
    opt.refresh_mask(now=True)
    opt.refresh_mask()
    with opt.first_pass():
        opt.backward(torch.nn.functional.cross_entropy(model(x), y))
    with opt.perturbed():
        torch.nn.functional.cross_entropy(model(x), y).backward()
    opt.step()
    assert opt.steps == 1
