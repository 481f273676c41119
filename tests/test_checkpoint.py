"""Save, kill, resume, compare: a resumed run equals the uninterrupted one bit for bit."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import sparsesam
from tests import cases


def loss_fn(output, target):
    return F.cross_entropy(output, target)


def fisher(**options):
    return sparsesam.fisher_mask(cases.images(64), loss_fn, sparsity=0.5, samples=16, refresh=3, **options)


RULES = {
    "sam": None,
    "ssam-f": fisher,
    "ssam-d": lambda: sparsesam.dynamic_mask(sparsity=0.5, refresh=2, total_steps=12),
    "ssam-d 2:4": lambda: sparsesam.dynamic_mask(pattern="2:4", refresh=2),
    "random": lambda: sparsesam.random_mask(sparsity=0.9, refresh=2),
    "fixed": lambda: sparsesam.fixed_mask("0.*"),
}


def make(kind, model, base=cases.sgd):
    schedule = sparsesam.InverseSqrt()
    if RULES[kind] is None:
        return sparsesam.SAM(base(model), model, rho=0.1, rho_schedule=schedule)
    return sparsesam.SSAM(base(model), model, rho=0.1, mask=RULES[kind](), rho_schedule=schedule)


def run(model, opt, steps):
    for seed in steps:
        x, y = cases.images(seed=seed)
        opt.step(cases.closure_for(model, opt, x, y))


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize(
    "base", [cases.sgd, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01)], ids=["sgd", "adamw"]
)
def test_resumed_run_equals_uninterrupted(kind, base):
    model = cases.convnet()
    opt = make(kind, model, base)
    run(model, opt, range(5))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    run(model, opt, range(5, 12))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = cases.convnet(seed=99)
    resumed = make(kind, again, base)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["opt"])
    run(again, resumed, range(5, 12))

    assert cases.same_bits(model.state_dict().values(), again.state_dict().values())
    assert opt.masks.keys() == resumed.masks.keys()
    assert all(torch.equal(opt.masks[name], resumed.masks[name]) for name in opt.masks)
    assert (opt.steps, opt.param_groups[0]["rho"]) == (resumed.steps, resumed.param_groups[0]["rho"])


@pytest.mark.parametrize("change", ["added", "frozen"])
@pytest.mark.parametrize("refresh", ["steps ago", "just now"])
def test_parameters_changed_before_a_checkpoint_get_a_mask_after_it(change, refresh):
    def made():
        model = cases.convnet()
        head = list(model[4].parameters())
        base = torch.optim.SGD(list(model.parameters()) if change == "frozen" else list(model[:4].parameters()), lr=0.1)
        return model, sparsesam.SSAM(base, model, mask=sparsesam.random_mask(sparsity=0.5)), head

    def changed(model, opt, head):
        model[0].weight.requires_grad_(change != "frozen")
        if change == "added":
            opt.add_param_group({"params": head})

    model, opt, head = made()
    run(model, opt, range(2))
    if refresh == "just now":
        opt.refresh_mask(now=True)
    changed(model, opt, head)
    state = copy.deepcopy((model.state_dict(), opt.state_dict()))
    again, resumed, head = made()
    changed(again, resumed, head)
    again.load_state_dict(state[0])
    resumed.load_state_dict(state[1])
    run(model, opt, range(2, 4))
    run(again, resumed, range(2, 4))
    assert all(torch.equal(opt.masks[name], resumed.masks[name]) for name in opt.masks)
    assert cases.same_bits(model.state_dict().values(), again.state_dict().values())


VARIANTS = {
    "gsam": lambda model: sparsesam.GSAM(cases.sgd(model), model, alpha=0.7),
    "wsam": lambda model: sparsesam.WSAM(cases.sgd(model), model, gamma=0.3, decouple=False),
    "extrapolated": lambda model: sparsesam.ExtrapolatedSAM(cases.sgd(model), model, 3.0),
}


@pytest.mark.parametrize("kind", [*RULES, *VARIANTS])
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"]
)
def test_copy_continues_like_original(kind, clone):
    model = cases.convnet()
    opt = VARIANTS[kind](model) if kind in VARIANTS else make(kind, model)
    torch.optim.lr_scheduler.StepLR(opt, 100)  # replaces opt.step by a function that cannot be pickled
    run(model, opt, range(4))
    twin, twin_opt = clone((model, opt))
    run(model, opt, range(4, 9))
    run(twin, twin_opt, range(4, 9))
    assert cases.same_bits(model.state_dict().values(), twin.state_dict().values())


def test_killed_process_resumes_to_same_weights(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, torch
            from tests import cases
            from tests.test_checkpoint import make

            path, die_at = sys.argv[1], int(sys.argv[2])
            torch.set_num_threads(1)
            model = cases.convnet()
            opt = make("ssam-d", model)
            if os.path.exists(path):
                saved = torch.load(path, weights_only=True)
                model.load_state_dict(saved["model"])
                opt.load_state_dict(saved["opt"])
            while opt.steps < 9:
                x, y = cases.images(seed=opt.steps)

                def closure():
                    opt.zero_grad()
                    loss = torch.nn.functional.cross_entropy(model(x), y)
                    loss.backward()
                    if opt.steps == die_at and opt.in_second_pass:
                        os._exit(9)      # killed in the middle of the second pass
                    return loss

                opt.step(closure)
                torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, path)
            """
        )
    )

    def run_script(path, die_at):
        return subprocess.run([sys.executable, script, path, str(die_at)], env=_environment(), check=False).returncode

    assert run_script(tmp_path / "whole.pt", -1) == 0
    assert run_script(tmp_path / "killed.pt", 6) == 9
    assert run_script(tmp_path / "killed.pt", -1) == 0
    whole, killed = (torch.load(tmp_path / name, weights_only=True) for name in ("whole.pt", "killed.pt"))
    assert cases.same_bits(whole["model"].values(), killed["model"].values())


def _environment():
    paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def test_base_checkpoint_loads_with_warning():
    model = cases.convnet()
    base = cases.sgd(model)
    x, y = cases.images()
    F.cross_entropy(model(x), y).backward()
    base.step()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.3)
    with pytest.warns(UserWarning, match="bare base optimizer"):
        opt.load_state_dict(base.state_dict())
    assert opt.param_groups[0]["rho"] == 0.3
    assert torch.equal(
        next(iter(opt.state.values()))["momentum_buffer"], next(iter(base.state.values()))["momentum_buffer"]
    )


def test_mismatched_checkpoint_changes_nothing():
    model = cases.convnet()
    opt = make("ssam-d", model)
    run(model, opt, range(2))
    saved = opt.state_dict()
    saved["state"][0]["sparsesam_mask"] = torch.ones(1, 2, dtype=torch.bool)
    before = {name: mask.clone() for name, mask in opt.masks.items()}
    with pytest.raises(ValueError, match=r"0\.weight"):
        opt.load_state_dict(saved)
    saved = opt.state_dict()
    saved["param_groups"][0]["sparsesam"]["version"] = 99
    with pytest.raises(ValueError, match="version"):
        opt.load_state_dict(saved)
    assert all(torch.equal(before[name], mask) for name, mask in opt.masks.items())


def test_checkpoint_hooks_are_called():
    model = cases.convnet()
    opt = make("sam", model)
    seen = []
    opt.register_state_dict_pre_hook(lambda o: seen.append("before save"))
    opt.register_state_dict_post_hook(lambda o, state: {**state, "extra": 1})
    opt.register_load_state_dict_post_hook(lambda o: seen.append("after load"))
    state = opt.state_dict()
    assert state.pop("extra") == 1
    opt.load_state_dict(state)
    assert seen == ["before save", "after load"]


def test_own_checkpoints_load_without_warning():
    model = cases.convnet()
    opt = make("ssam-d", model)
    run(model, opt, range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.load_state_dict(opt.state_dict())


@pytest.mark.parametrize("first", [sparsesam.SAM, sparsesam.ExtrapolatedSAM])
@pytest.mark.parametrize("steps", [0, 2])
def test_checkpoint_with_another_meaning_of_rho_raises(first, steps):
    second = {sparsesam.SAM: sparsesam.ExtrapolatedSAM, sparsesam.ExtrapolatedSAM: sparsesam.SAM}[first]
    model = cases.mlp()
    opt = first(cases.sgd(model), model)
    for seed in range(steps):
        opt.step(cases.closure_for(model, opt, *cases.vectors(8, seed=seed)))
    other = second(cases.sgd(model), model)
    before = dict(other.param_groups[0])
    with pytest.raises(
        ValueError, match=f"saved by an optimizer with {first.strength}, but this .* has {second.strength}"
    ):
        other.load_state_dict(opt.state_dict())
    assert other.param_groups[0] == before


def test_checkpoint_without_perturbed_parameters_loads():
    model = cases.mlp()
    opt = sparsesam.ExtrapolatedSAM(cases.sgd(model), model)
    for group in opt.param_groups:
        group["perturb"] = False
    opt.step(cases.closure_for(model, opt, *cases.vectors(8)))
    opt.load_state_dict(opt.state_dict())
    assert opt.steps == 1
