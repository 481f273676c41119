"""Lightning's Trainer reaches the weights that a plain loop reaches."""

from __future__ import annotations

import copy
import itertools
import logging
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import sparsesam
from tests import cases
from tests.docs import pages

pytorch_lightning = pytest.importorskip("pytorch_lightning")

from sparsesam.integrations.lightning import (  # noqa: E402
    AccumulatedAscent,
    SharpnessAwareMixedPrecision,
    SharpnessAwareMonitor,
)

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

NAMES = {"pytorch_lightning": pytorch_lightning, "torch": torch, "sparsesam": sparsesam, "loss_fn": F.cross_entropy}
documented = partial(pages.run, "docs/lightning.md", **NAMES)
Classifier = documented(0)["Classifier"]


class Configured(Classifier):
    """The same with a small model and another method or options."""

    def __init__(self, net, kind=sparsesam.SSAM, **options):
        super().__init__(net)
        self.kind, self.options = kind, {"rho": 0.3, **options}

    def validation_step(self, batch, batch_idx):
        self.net(batch[0])

    def configure_optimizers(self):
        return self.kind(cases.sgd(self.net), self.net, **self.options)


def test_imported_lightning_is_preferred(tmp_path):
    other = tmp_path / "lightning" / "pytorch"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("class Callback: pass\nfrom lightning.pytorch import plugins")
    (other / "plugins.py").write_text("class MixedPrecision: pass")
    script = (
        "import pytorch_lightning, sys; sys.path.insert(0, sys.argv[1])\n"
        "from sparsesam.integrations.lightning import SharpnessAwareMixedPrecision as Plugin\n"
        "assert issubclass(Plugin, pytorch_lightning.plugins.MixedPrecision)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)


def batches(dtype=torch.float64):
    return DataLoader(TensorDataset(*cases.vectors(40, dtype)), batch_size=8)


def image_batches():
    return DataLoader(TensorDataset(*cases.images(40)), batch_size=8)


def fit(module, tmp_path, *, loader=None, count=1, callbacks=(), ckpt_path=None, val_dataloaders=None, **options):
    """Two epochs, of steps over ``count`` batches with the callback of docs/lightning.md."""
    callbacks = [*callbacks, *([AccumulatedAscent()] if count > 1 else [])]
    switches = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = {"max_epochs": 2, "accelerator": "cpu", "default_root_dir": tmp_path, **dict.fromkeys(switches, False)}
    given = {**quiet, "accumulate_grad_batches": count, "callbacks": callbacks, **options}
    trainer = pytorch_lightning.Trainer(**given)
    trainer.fit(module, loader or batches(), val_dataloaders, ckpt_path=ckpt_path)
    return trainer


def loss_of(module, batch):
    """What `training_step` computes, without a Trainer."""
    x, y = batch
    return F.cross_entropy(module.net(x), y)


def plain(module, loader, *, count=1, clip=None, precision=nullcontext, scaler=None):
    """Two epochs of two-phase steps, each over ``count`` batches; a step at an epoch's end may have fewer."""
    configured = module.configure_optimizers()
    (opt,), schedulers = configured if isinstance(configured, tuple) else ((configured,), [])
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)

    def backward(group):
        for batch in group:
            with precision():
                loss = loss_of(module, batch) / count
            scaler.scale(loss).backward()

    for _ in range(2):
        steps = list(loader)
        for group in (steps[at : at + count] for at in range(0, len(steps), count)):
            opt.zero_grad()
            backward(group)
            with opt.perturbed():
                backward(group)
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(module.parameters(), torch.inf if clip is None else clip)
            scaler.step(opt)
            scaler.update()
        for scheduler in schedulers:
            scheduler.step()
    return opt


def assert_same_run(module, twin, opt):
    mine = module.trainer.optimizers[0]
    cases.assert_close(module, twin)
    cases.assert_same_masks(mine, opt)
    assert (mine.steps, mine.param_groups[0]["lr"]) == (opt.steps, opt.param_groups[0]["lr"])


# ---- the Trainer equals a plain loop -----------------------------------------------------------------------------

LAST = {"mask": sparsesam.fixed_mask("4.*"), "norm": "masked"}
ONE_PASS = {"kind": sparsesam.ExtrapolatedSAM, "rho": 0.025}
OnePass = partial(Configured, **ONE_PASS)


Narrowing = documented(1, Classifier=Configured)["Cheaper"]
Manual = documented(5, Classifier=Configured)["Manual"]


class ManualClosure(Configured):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        opt, compute = self.optimizers(), super().training_step
        opt.step(cases.closure_of(opt, lambda: compute(batch, batch_idx), backward=self.manual_backward))


MODULES = {
    "documented": Classifier,
    "one pass": OnePass,
    "every other step": partial(Configured, mask=sparsesam.fixed_mask("4.*"), every=2),
    "last layer": partial(Configured, **LAST),
    "narrowing": partial(Narrowing, **LAST),
    "manual": partial(Manual, **LAST),
    "manual closure": partial(ManualClosure, **LAST),
}
AUTOMATIC = [name for name in MODULES if "manual" not in name]


def fp16(plugin=SharpnessAwareMixedPrecision):
    return [plugin("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**4))]


@pytest.mark.parametrize(
    ("name", "precision", "count", "clip"),
    [
        *itertools.product(AUTOMATIC, ["float64"], [1, 2], [None, 0.1]),
        *itertools.product(["documented", "one pass"], ["fp16"], [1, 2], [None, 0.1]),
        *itertools.product(["manual", "manual closure"], ["float64"], [1], [None]),
        ("documented", "bf16", 1, None),
        ("manual", "fp16", 1, None),
    ],
)
def test_trainer_equals_plain_loop(name, precision, count, clip, tmp_path):
    module = MODULES[name](cases.mlp(torch.float64 if precision == "float64" else torch.float32))
    twin, loader = copy.deepcopy(module), batches(torch.float64 if precision == "float64" else torch.float32)
    if name not in ("documented", "one pass"):
        twin.options["engine"] = False
    given, options = {"float64": {}, "bf16": {"precision": "bf16-mixed"}, "fp16": {"plugins": fp16()}}[precision], {}
    if precision != "float64":
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        options["precision"] = partial(torch.autocast, "cpu", dtype, cache_enabled=False)
    if precision == "fp16":
        options["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    fit(module, tmp_path, loader=loader, count=count, gradient_clip_val=clip, **given)
    assert_same_run(module, twin, plain(twin, loader, count=count, clip=clip, **options))
    savings = module.trainer.optimizers[0].savings()
    if name in ("last layer", "narrowing", "manual", "manual closure"):
        assert savings.reused > 0
        assert (savings.gradients > 0.5) is (name in ("narrowing", "manual"))  # loss.backward() computes everything


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Classifier, {"plugins": fp16(pytorch_lightning.plugins.MixedPrecision)}),
        (Classifier, {"accumulate_grad_batches": 2}),
        (OnePass, {"accumulate_grad_batches": 2}),
    ],
)
def test_missing_plugin_or_callback_raises_in_first_step_and_names_page(kind, options, tmp_path):
    module = kind(cases.mlp())
    before = cases.weights_of(module)
    with pytest.raises(RuntimeError, match=r"docs/moving-over\.md"):
        fit(module, tmp_path, **options)
    assert cases.same_bits(before, cases.weights_of(module))


def test_overflow_skips_step_and_lowers_scale(tmp_path):
    class Overflowing(Configured):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (torch.inf if batch_idx == 0 else 1.0)

    module, plugins = Overflowing(cases.mlp(torch.float32), mask=sparsesam.random_mask(sparsity=0.5)), fp16()
    with pytest.warns(RuntimeWarning, match="skipped_ascents"):
        fit(module, tmp_path, max_epochs=1, plugins=plugins, loader=batches(torch.float32))
    assert plugins[0].scaler.get_scale() == 2.0**3
    assert module.trainer.optimizers[0].steps == 4


def test_resumed_fit_equals_uninterrupted(tmp_path):
    module, interrupted, resumed = (Classifier(cases.mlp()) for _ in range(3))
    fit(module, tmp_path)
    fit(interrupted, tmp_path, max_epochs=1).save_checkpoint(tmp_path / "half.ckpt")
    fit(resumed, tmp_path, ckpt_path=tmp_path / "half.ckpt")
    assert_same_run(resumed, module, module.trainer.optimizers[0])
    assert cases.same_state(resumed, module)


# ---- accumulation ------------------------------------------------------------------------------------------------


def test_accumulation_uses_same_random_numbers_in_both_passes(tmp_path):
    drawn = []

    class Drawing(Configured):
        def training_step(self, batch, batch_idx):
            drawn.append(torch.rand(()).item())
            return super().training_step(batch, batch_idx)

    module = Drawing(cases.mlp(), mask=sparsesam.random_mask(sparsity=0.5))
    fit(module, tmp_path, count=2, max_steps=1)
    first, last, last_again, first_again = drawn
    assert (first_again, last_again) == (first, last)


class Counting(Configured):
    """Records in each pass whether its weights are perturbed."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.forwards, self.backwards = [], []

    def training_step(self, batch, batch_idx):
        self.forwards.append(self.optimizers().is_perturbed)
        return super().training_step(batch, batch_idx)

    def backward(self, loss):
        self.backwards.append(self.optimizers().is_perturbed)
        super().backward(loss)


def test_one_pass_accumulation_has_one_backward_per_batch_and_one_statistics_update(tmp_path):
    module, twin = Counting(cases.convnet(), **ONE_PASS), cases.convnet()
    fit(module, tmp_path, loader=image_batches(), max_epochs=1, count=3)
    assert module.backwards == [True] * 5
    assert module.forwards == [False, False, True, True, True, False, True, True]
    opt = sparsesam.ExtrapolatedSAM(cases.sgd(twin), twin, 0.025)
    steps = list(image_batches())
    for group in ((steps[2], steps[0], steps[1]), (steps[4], steps[3])):  # the last batch runs first
        opt.zero_grad()
        with opt.perturbed():
            for x, y in group:
                (F.cross_entropy(twin(x), y) / 3).backward()
        opt.step()
    torch.testing.assert_close(module.net.state_dict(), twin.state_dict(), rtol=1e-9, atol=1e-12)


# ---- skipped steps, and weight averaging -------------------------------------------------------------------------


class SkippingSteps(Configured):
    """Returns None for some batches, Lightning's way to skip a step."""

    left_out = {0, 2}  # noqa: RUF012

    def training_step(self, batch, batch_idx):
        return None if batch_idx in self.left_out else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:the closure computed no gradient:RuntimeWarning")
@pytest.mark.parametrize("kind", [SkippingSteps, partial(SkippingSteps, every=2), partial(SkippingSteps, **ONE_PASS)])
def test_training_step_returning_none_takes_no_step(kind, tmp_path):
    module = kind(cases.mlp(), mask=sparsesam.random_mask(sparsity=0.5))
    twin = copy.deepcopy(module)
    fit(module, tmp_path, max_epochs=1)
    opt = twin.configure_optimizers()
    for number, batch in enumerate(batches()):
        if number in module.left_out:
            opt.step(opt.zero_grad)  # returns None
        else:
            cases.with_closure(opt, twin.net, *batch)
    assert cases.same_state(module, twin)
    assert module.trainer.optimizers[0].skipped_steps == 2


def test_none_for_last_of_several_batches_skips_that_batch(tmp_path):
    module = SkippingSteps(cases.mlp(), mask=sparsesam.random_mask(sparsity=0.5))
    module.left_out = {1}
    twin = copy.deepcopy(module)
    fit(module, tmp_path, max_steps=1, count=2)
    cases.take_step(twin.configure_optimizers(), lambda: loss_of(twin, next(iter(batches()))) / 2)
    cases.assert_close(module, twin)


@pytest.mark.filterwarnings("ignore:the closure computed no gradient:RuntimeWarning")
@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_averaged_weights_get_statistics_in_epoch_without_steps(count, validates, tmp_path):
    module, loader = Configured(cases.convnet(), mask=sparsesam.random_mask(sparsity=0.5)), image_batches()
    average = pytorch_lightning.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    validation = {"val_dataloaders": loader} if validates else {}
    fit(module, tmp_path, loader=loader, count=count, callbacks=[average], **validation)
    assert module.trainer.optimizers[0].steps == 2 * (5 if count == 1 else 3)
    averaged = copy.deepcopy(module.net)
    averaged[1].reset_running_stats()
    averaged[1].momentum = None
    for x, _ in loader:
        averaged(x)
    assert cases.same_bits(cases.weights_of(module), cases.weights_of(average._average_model))
    torch.testing.assert_close(list(module.net.buffers()), list(averaged.buffers()))


# ---- Fabric ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_documented_fabric_loop_equals_plain_loop(precision):
    lightning_fabric = pytest.importorskip("lightning_fabric")
    fabric = lightning_fabric.Fabric(accelerator="cpu", precision=precision)
    model, twin = cases.mlp(torch.float32), cases.mlp(torch.float32)
    last_layer = SimpleNamespace(SAM=partial(sparsesam.SSAM, **LAST))  # in place of the page's SAM
    loader = batches(torch.float32)
    opt = documented(6, fabric=fabric, model=model, loader=loader, sparsesam=last_layer)["opt"]
    other = sparsesam.SSAM(cases.sgd(twin), twin, rho=0.05, engine=False, **LAST)
    for x, y in loader:

        def loss(x=x, y=y):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                return F.cross_entropy(twin(x), y)

        cases.over_micro_batches(other, [loss])
    cases.assert_close(model, twin, rtol=1e-6, atol=1e-7)
    assert opt.steps == other.steps == 5
    assert opt.savings().gradients > 0.5


# ---- logging -----------------------------------------------------------------------------------------------------


class Logging(Configured):
    """Logs in the first pass alone, as documented."""

    seen = ()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen += () if self.optimizers().in_second_pass else (loss.item(),)
        return loss


@pytest.mark.parametrize("options", [{}, ONE_PASS], ids=["two passes", "one pass"])
@pytest.mark.parametrize("count", [1, 2])
def test_metrics_that_respect_in_second_pass_are_counted_once(count, options, tmp_path):
    module = Logging(cases.mlp(), mask=sparsesam.random_mask(sparsity=0.5), **options)
    callbacks = [AccumulatedAscent()] if count == 1 else []  # with one batch it changes nothing
    trainer = fit(module, tmp_path, max_epochs=1, count=count, callbacks=callbacks)
    assert len(module.seen) == 5
    assert trainer.callback_metrics["loss_epoch"].item() == pytest.approx(sum(module.seen) / 5)


def test_monitor_logs_rho_sparsity_norm_and_counters(tmp_path):
    module = Configured(cases.mlp(), mask=sparsesam.fixed_mask("4.*"), rho_schedule=sparsesam.Warmup(20))
    trainer = fit(module, tmp_path, callbacks=[SharpnessAwareMonitor()])
    found, opt = trainer.callback_metrics, trainer.optimizers[0]
    assert found["sam/rho"].item() == pytest.approx(0.15)
    assert found["sam/sparsity"].item() == pytest.approx(opt.sparsity)
    assert found["sam/ascent_norm"].item() == pytest.approx(opt.last_ascent_norm)
    assert found["sam/skipped_ascents"] == found["sam/skipped_steps"] == 0
