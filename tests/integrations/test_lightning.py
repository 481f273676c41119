"""Lightning's Trainer reaches the weights that a plain loop reaches."""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import sparsesam
from tests import cases
from tests.integrations import snippets

pytorch_lightning = pytest.importorskip("pytorch_lightning")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

Classifier = snippets.run(
    "Lightning", 0, pytorch_lightning=pytorch_lightning, torch=torch, sparsesam=sparsesam, loss_fn=F.cross_entropy
)["Classifier"]


class Configured(Classifier):
    """The same with another mask or engine."""

    def __init__(self, net, **options):
        super().__init__(net)
        self.options = options

    def configure_optimizers(self):
        return sparsesam.SSAM(cases.sgd(self.net), self.net, rho=0.3, **self.options)


class Remembering(nn.Module):
    """Draws a random number in each call and keeps it."""

    def __init__(self):
        super().__init__()
        self.net, self.drawn = cases.mlp(), []

    def forward(self, x):
        self.drawn.append(torch.rand(()).item())
        return self.net(x)


def quiet(tmp_path):
    switches = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return {"max_epochs": 2, "accelerator": "cpu", "default_root_dir": tmp_path, **dict.fromkeys(switches, False)}


def batches(dtype=torch.float64):
    return DataLoader(TensorDataset(*cases.vectors(40, dtype)), batch_size=8)


def fit(module, options, *, loader=None, **more):
    trainer = pytorch_lightning.Trainer(**options)
    trainer.fit(module, loader or batches(), **more)
    return trainer


def accumulating(options):
    return snippets.run("Lightning", 1, pytorch_lightning=pytorch_lightning, options=options)["trainer"]


def plain(module, loader, *, count=1, clip=None, precision=nullcontext):
    """Two epochs of two-phase steps, each over ``count`` batches; a step at an epoch's end may have fewer."""
    configured = module.configure_optimizers()
    (opt,), schedulers = configured if isinstance(configured, tuple) else ((configured,), [])
    module.train()

    def backward(group):
        for batch in group:
            with precision():
                loss = module.training_step(batch, 0) / count
            loss.backward()

    for _ in range(2):
        steps = list(loader)
        for group in (steps[at : at + count] for at in range(0, len(steps), count)):
            opt.zero_grad()
            backward(group)
            with opt.perturbed():
                backward(group)
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            opt.step()
        for scheduler in schedulers:
            scheduler.step()
    return opt


def assert_same_run(module, twin, opt):
    mine = module.trainer.optimizers[0]
    torch.testing.assert_close(cases.weights_of(module), cases.weights_of(twin), rtol=1e-9, atol=1e-12)
    assert all(torch.equal(mask, opt.masks[name]) for name, mask in mine.masks.items())
    assert (mine.steps, mine.param_groups[0]["lr"]) == (opt.steps, opt.param_groups[0]["lr"])


@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_trainer_equals_a_plain_loop(clip, tmp_path):
    module = Classifier(cases.mlp())
    twin = copy.deepcopy(module)
    fit(module, {**quiet(tmp_path), "gradient_clip_val": clip})
    assert_same_run(module, twin, plain(twin, batches(), clip=clip))


def test_bf16_equals_a_plain_loop_under_autocast(tmp_path):
    module = Classifier(cases.mlp(torch.float32))
    twin = copy.deepcopy(module)
    loader = batches(torch.float32)
    fit(module, {**quiet(tmp_path), "precision": "bf16-mixed"}, loader=loader)
    opt = plain(twin, loader, precision=lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False))
    assert_same_run(module, twin, opt)


def test_fp16_is_refused_rather_than_taken_without_an_ascent(tmp_path):
    plugin = pytorch_lightning.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(RuntimeError, match=r"step\(\) needs a gradient at w \+ e"):
        fit(Classifier(cases.mlp()), {**quiet(tmp_path), "plugins": [plugin]})


def test_a_resumed_fit_equals_the_uninterrupted_one(tmp_path):
    module = Classifier(cases.mlp())
    interrupted, resumed = copy.deepcopy(module), copy.deepcopy(module)
    fit(module, quiet(tmp_path))
    fit(interrupted, {**quiet(tmp_path), "max_epochs": 1}).save_checkpoint(tmp_path / "half.ckpt")
    fit(resumed, quiet(tmp_path), ckpt_path=tmp_path / "half.ckpt")
    assert_same_run(resumed, module, module.trainer.optimizers[0])
    assert cases.same_bits(cases.weights_of(resumed), cases.weights_of(module))


@pytest.mark.parametrize("clip", [None, 0.1])
def test_accumulation_equals_a_plain_loop(clip, tmp_path):
    module = Classifier(cases.mlp())
    twin = copy.deepcopy(module)
    accumulating({**quiet(tmp_path), "gradient_clip_val": clip}).fit(module, batches())
    assert_same_run(module, twin, plain(twin, batches(), count=2, clip=clip))


@pytest.mark.parametrize("cadence", [{"every": 2}, {"every": 2, "off_steps": "reuse"}], ids=str)
def test_accumulation_with_fewer_ascents_equals_a_plain_loop(cadence, tmp_path):
    module = Configured(cases.mlp(), mask=sparsesam.fixed_mask("4.*"), **cadence)
    twin = copy.deepcopy(module)
    accumulating(quiet(tmp_path)).fit(module, batches())
    assert_same_run(module, twin, plain(twin, batches(), count=2))


def test_accumulation_sees_the_same_random_numbers_in_both_passes(tmp_path):
    module = Configured(Remembering(), mask=sparsesam.random_mask(sparsity=0.5))
    accumulating({**quiet(tmp_path), "max_steps": 1}).fit(module, batches())
    first, last, last_again, first_again = module.net.drawn
    assert (first_again, last_again) == (first, last)


def test_an_epochs_mean_of_what_is_logged_is_over_both_passes(tmp_path):
    class Logging(Configured):
        seen = ()

        def training_step(self, batch):
            loss = super().training_step(batch, 0)
            self.seen += (loss.item(),)
            self.log("loss", loss, on_epoch=True)
            return {"loss": loss}

    module = Logging(cases.mlp(), mask=sparsesam.random_mask(sparsity=0.5))
    trainer = accumulating({**quiet(tmp_path), "max_epochs": 1})
    trainer.fit(module, batches())
    assert len(module.seen) == 10
    assert trainer.callback_metrics["loss"].item() == pytest.approx(sum(module.seen) / 10)


@pytest.mark.parametrize("trainer", [pytorch_lightning.Trainer, accumulating], ids=["each batch", "accumulating"])
def test_the_engine_saves_and_changes_nothing(trainer, tmp_path):
    masked = {"mask": sparsesam.fixed_mask("4.*"), "norm": "masked"}
    module = Configured(cases.mlp(), **masked)
    twin = Configured(copy.deepcopy(module.net), engine=False, **masked)
    for one in (module, twin):
        options = quiet(tmp_path)
        (trainer(options) if trainer is accumulating else trainer(**options)).fit(one, batches())
    assert module.trainer.optimizers[0].engine_report()["engine"].startswith("on")
    assert_same_run(module, twin, twin.trainer.optimizers[0])
