"""Lightning's Trainer reaches the weights that a plain loop reaches."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from contextlib import nullcontext
from functools import partial

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

PAGE = "docs/lightning.md"
Classifier = pages.run(
    PAGE, 0, pytorch_lightning=pytorch_lightning, torch=torch, sparsesam=sparsesam, loss_fn=F.cross_entropy
)["Classifier"]


class Configured(Classifier):
    """The same with other options."""

    def __init__(self, net, **options):
        super().__init__(net)
        self.options = options

    def validation_step(self, batch, batch_idx):
        self.net(batch[0])

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
    return pages.run(PAGE, 2, pytorch_lightning=pytorch_lightning, options=options)["trainer"]


def loss_of(module, batch):
    """What `training_step` computes, without a Trainer."""
    x, y = batch
    return F.cross_entropy(module.net(x), y)


def plain(module, loader, *, count=1, clip=None, precision=nullcontext, scaler=None):
    """Two epochs of two-phase steps, each over ``count`` batches; a step at an epoch's end may have fewer."""
    configured = module.configure_optimizers()
    (opt,), schedulers = configured if isinstance(configured, tuple) else ((configured,), [])
    module.train()

    def backward(group):
        for batch in group:
            with precision():
                loss = loss_of(module, batch) / count
            (loss if scaler is None else scaler.scale(loss)).backward()

    for _ in range(2):
        steps = list(loader)
        for group in (steps[at : at + count] for at in range(0, len(steps), count)):
            opt.zero_grad()
            backward(group)
            with opt.perturbed():
                backward(group)
            if scaler is not None:
                scaler.unscale_(opt)
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            opt.step() if scaler is None else scaler.step(opt)
            if scaler is not None:
                scaler.update()
        for scheduler in schedulers:
            scheduler.step()
    return opt


def assert_same_run(module, twin, opt):
    mine = module.trainer.optimizers[0]
    torch.testing.assert_close(cases.weights_of(module), cases.weights_of(twin), rtol=1e-9, atol=1e-12)
    assert all(torch.equal(mask, opt.masks[name]) for name, mask in mine.masks.items())
    assert (mine.steps, mine.param_groups[0]["lr"]) == (opt.steps, opt.param_groups[0]["lr"])


@pytest.mark.parametrize("clip", [None, 0.1])
def test_trainer_equals_plain_loop(clip, tmp_path):
    module = Classifier(cases.mlp())
    twin = copy.deepcopy(module)
    fit(module, {**quiet(tmp_path), "gradient_clip_val": clip})
    assert_same_run(module, twin, plain(twin, batches(), clip=clip))


def test_bf16_equals_plain_loop_under_autocast(tmp_path):
    module = Classifier(cases.mlp(torch.float32))
    twin = copy.deepcopy(module)
    loader = batches(torch.float32)
    fit(module, {**quiet(tmp_path), "precision": "bf16-mixed"}, loader=loader)
    opt = plain(twin, loader, precision=lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False))
    assert_same_run(module, twin, opt)


class OnePass(Classifier):
    def configure_optimizers(self):
        return sparsesam.ExtrapolatedSAM(cases.sgd(self.net), self.net, 5.0)


def fp16(plugin):
    return [plugin("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**4))]


def test_fp16_without_plugin_raises_and_names_page(tmp_path):
    plugins = fp16(pytorch_lightning.plugins.MixedPrecision)
    with pytest.raises(RuntimeError, match=r"docs/moving-over\.md"):
        fit(Classifier(cases.mlp()), {**quiet(tmp_path), "plugins": plugins})


@pytest.mark.parametrize("kind", [Classifier, OnePass])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_fp16_equals_plain_loop_with_scaler(clip, count, kind, tmp_path):
    module = kind(cases.mlp(torch.float32))
    twin = copy.deepcopy(module)
    loader = batches(torch.float32)
    accumulation = {"accumulate_grad_batches": count, "callbacks": [AccumulatedAscent()]} if count > 1 else {}
    plugins = fp16(SharpnessAwareMixedPrecision)
    fit(module, {**quiet(tmp_path), "plugins": plugins, "gradient_clip_val": clip, **accumulation}, loader=loader)
    precision, scaler = (
        partial(torch.autocast, "cpu", torch.float16, cache_enabled=False),
        torch.amp.GradScaler("cpu", init_scale=2.0**4),
    )
    opt = plain(twin, loader, count=count, clip=clip, precision=precision, scaler=scaler)
    assert_same_run(module, twin, opt)
    assert cases.same_bits(cases.weights_of(module), cases.weights_of(twin)) or count > 1


def test_overflow_skips_step_and_lowers_scale(tmp_path):
    class Overflowing(Configured):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (torch.inf if batch_idx == 0 else 1.0)

    module = Overflowing(cases.mlp(torch.float32), mask=sparsesam.random_mask(sparsity=0.5))
    plugins = fp16(SharpnessAwareMixedPrecision)
    with pytest.warns(RuntimeWarning, match="skipped_ascents"):
        fit(module, {**quiet(tmp_path), "max_epochs": 1, "plugins": plugins}, loader=batches(torch.float32))
    assert plugins[0].scaler.get_scale() == 2.0**3
    assert module.trainer.optimizers[0].steps == 4


def test_resumed_fit_equals_uninterrupted(tmp_path):
    module = Classifier(cases.mlp())
    interrupted, resumed = copy.deepcopy(module), copy.deepcopy(module)
    fit(module, quiet(tmp_path))
    fit(interrupted, {**quiet(tmp_path), "max_epochs": 1}).save_checkpoint(tmp_path / "half.ckpt")
    fit(resumed, quiet(tmp_path), ckpt_path=tmp_path / "half.ckpt")
    assert_same_run(resumed, module, module.trainer.optimizers[0])
    assert cases.same_bits(cases.weights_of(resumed), cases.weights_of(module))


@pytest.mark.parametrize("clip", [None, 0.1])
def test_accumulation_equals_plain_loop(clip, tmp_path):
    module = Classifier(cases.mlp())
    twin = copy.deepcopy(module)
    accumulating({**quiet(tmp_path), "gradient_clip_val": clip}).fit(module, batches())
    assert_same_run(module, twin, plain(twin, batches(), count=2, clip=clip))


@pytest.mark.parametrize("schedule", [{"every": 2}, {"every": 2, "off_steps": "reuse"}], ids=str)
def test_accumulation_with_fewer_ascents_equals_plain_loop(schedule, tmp_path):
    module = Configured(cases.mlp(), mask=sparsesam.fixed_mask("4.*"), **schedule)
    twin = copy.deepcopy(module)
    accumulating(quiet(tmp_path)).fit(module, batches())
    assert_same_run(module, twin, plain(twin, batches(), count=2))


def test_accumulation_uses_same_random_numbers_in_both_passes(tmp_path):
    module = Configured(Remembering(), mask=sparsesam.random_mask(sparsity=0.5))
    accumulating({**quiet(tmp_path), "max_steps": 1}).fit(module, batches())
    first, last, last_again, first_again = module.net.drawn
    assert (first_again, last_again) == (first, last)


def test_one_pass_accumulation_equals_plain_loop(tmp_path):
    module = OnePass(cases.mlp())
    twin = copy.deepcopy(module)
    accumulating(quiet(tmp_path)).fit(module, batches())
    assert_same_run(module, twin, plain(twin, batches(), count=2))


class Counting(OnePass):
    """Counts passes, and records whether its weights are perturbed in each."""

    def __init__(self, net):
        super().__init__(net)
        self.forwards, self.backwards = [], []

    def training_step(self, batch, batch_idx):
        self.forwards.append(self.optimizers().is_perturbed)
        return super().training_step(batch, batch_idx)

    def backward(self, loss):
        self.backwards.append(self.optimizers().is_perturbed)
        super().backward(loss)


def test_one_pass_accumulation_has_one_backward_per_batch_and_one_statistics_update(tmp_path):
    module = Counting(cases.convnet())
    twin = copy.deepcopy(module.net)
    loader = DataLoader(TensorDataset(*cases.images(40)), batch_size=8)
    options = {**quiet(tmp_path), "max_epochs": 1, "accumulate_grad_batches": 3, "callbacks": [AccumulatedAscent()]}
    fit(module, options, loader=loader)
    assert module.backwards == [True] * 5
    assert module.forwards == [False, False, True, True, True, False, True, True]

    opt = sparsesam.ExtrapolatedSAM(cases.sgd(twin), twin, 5.0)
    steps = list(loader)
    for first, *others in ((steps[2], steps[0], steps[1]), (steps[4], steps[3])):  # the last batch runs first
        with opt.perturbed():
            for x, y in (first, *others):
                (F.cross_entropy(twin(x), y) / 3).backward()
        opt.step()
        opt.zero_grad()
    torch.testing.assert_close(module.net.state_dict(), twin.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [Classifier, OnePass])
def test_accumulation_without_callback_raises_in_first_step(kind, tmp_path):
    module = kind(cases.mlp())
    before = cases.weights_of(module)
    with pytest.raises(RuntimeError, match=r"docs/moving-over\.md"):
        fit(module, {**quiet(tmp_path), "accumulate_grad_batches": 2})
    assert cases.same_bits(before, cases.weights_of(module))


class PartlyTrained(Configured):
    """Its first layer is trainable, but not in the optimizer."""

    def configure_optimizers(self):
        base = torch.optim.SGD(self.net[2:].parameters(), lr=0.1, momentum=0.9)
        return sparsesam.SAM(base, self.net, rho=0.3)


@pytest.mark.parametrize("batches_of_four", [1, 2])
def test_parameters_outside_optimizer_have_gradient_of_second_pass(batches_of_four, tmp_path):
    count = batches_of_four
    module = PartlyTrained(cases.mlp())
    twin = copy.deepcopy(module)
    options = {**quiet(tmp_path), "max_epochs": 1, "accumulate_grad_batches": count, "callbacks": [AccumulatedAscent()]}
    fit(module, {**options, "limit_train_batches": 4})
    opt = twin.configure_optimizers()
    groups = list(batches())[:4]
    sums = torch.zeros_like(twin.net[0].weight)
    for group in (groups[at : at + count] for at in range(0, 4, count)):
        opt.zero_grad()
        for batch in group:
            (loss_of(twin, batch) / count).backward()
        with opt.perturbed():
            twin.net[0].zero_grad()
            for batch in group:
                (loss_of(twin, batch) / count).backward()
        sums += twin.net[0].weight.grad
        opt.step()
    torch.testing.assert_close(cases.weights_of(module), cases.weights_of(twin), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(module.net[0].weight.grad, sums)  # as with SGD, it is never cleared


# ---- skipped steps, and weight averaging ------------------------------------------------------------------


class SkippingSteps(Configured):
    """Returns None for some batches, Lightning's way to skip a step."""

    def __init__(self, net, left_out, **options):
        super().__init__(net, **options)
        self.left_out = left_out

    def training_step(self, batch, batch_idx):
        return None if batch_idx in self.left_out else super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        method = self.options.pop("method", sparsesam.SAM)
        return method(cases.sgd(self.net), self.net, rho=0.3, **self.options)


@pytest.mark.filterwarnings("ignore:the closure computed no gradient:RuntimeWarning")
@pytest.mark.parametrize("options", [{}, {"every": 2}, {"method": sparsesam.MomentumSAM}], ids=str)
def test_training_step_returning_none_takes_no_step(options, tmp_path):
    module = SkippingSteps(cases.mlp(), {0, 2}, **options)
    twin = copy.deepcopy(module)
    fit(module, {**quiet(tmp_path), "max_epochs": 1})
    opt = twin.configure_optimizers()
    for number, (x, y) in enumerate(batches()):
        if number in (0, 2):
            opt.step(opt.zero_grad)  # returns None
        else:
            opt.step(cases.closure_for(twin.net, opt, x, y))
    assert cases.same_bits(cases.weights_of(module), cases.weights_of(twin))
    assert module.trainer.optimizers[0].skipped_steps == 2


def test_none_for_last_of_several_batches_skips_that_batch(tmp_path):
    module = SkippingSteps(cases.mlp(), {1})
    twin = copy.deepcopy(module)
    fit(
        module,
        {**quiet(tmp_path), "max_steps": 1, "accumulate_grad_batches": 2, "callbacks": [AccumulatedAscent()]},
    )
    opt = twin.configure_optimizers()
    x, y = next(iter(batches()))
    (F.cross_entropy(twin.net(x), y) / 2).backward()
    with opt.perturbed():
        (F.cross_entropy(twin.net(x), y) / 2).backward()
    opt.step()
    torch.testing.assert_close(cases.weights_of(module), cases.weights_of(twin), rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:the closure computed no gradient:RuntimeWarning")
@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("callbacks", [[], [AccumulatedAscent()]], ids=["each batch", "accumulating"])
def test_averaged_weights_get_statistics_in_epoch_without_steps(callbacks, validates, tmp_path):
    module = Configured(cases.convnet(), mask=sparsesam.random_mask(sparsity=0.5))
    average = pytorch_lightning.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    loader = DataLoader(TensorDataset(*cases.images(40)), batch_size=8)
    options = {**quiet(tmp_path), "callbacks": [average, *callbacks], "accumulate_grad_batches": 1 + len(callbacks)}
    fit(module, options, loader=loader, **({"val_dataloaders": loader} if validates else {}))
    assert module.trainer.optimizers[0].steps == 2 * (3 if callbacks else 5)
    averaged = copy.deepcopy(module.net)
    for norm in (layer for layer in averaged if isinstance(layer, nn.BatchNorm2d)):
        norm.reset_running_stats()
        norm.momentum = None
    for x, _ in loader:
        averaged(x)
    assert cases.same_bits(cases.weights_of(module), cases.weights_of(average._average_model))
    torch.testing.assert_close(list(module.net.buffers()), list(averaged.buffers()))


class Narrowing(Configured):
    """With the hook of docs/lightning.md."""

    def backward(self, loss):
        self.optimizers().backward(loss)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_backward_hook_narrows_first_pass(clip, count, tmp_path):
    module = Narrowing(cases.mlp(), mask=sparsesam.fixed_mask("4.*"), norm="masked")
    twin = Configured(copy.deepcopy(module.net), engine=False, **module.options)
    callbacks = [AccumulatedAscent()] if count > 1 else []
    options = {**quiet(tmp_path), "gradient_clip_val": clip, "accumulate_grad_batches": count, "callbacks": callbacks}
    fit(module, options)
    assert_same_run(module, twin, plain(twin, batches(), count=count, clip=clip))
    assert module.trainer.optimizers[0].savings().gradients > 0.5


# ---- manual optimization ---------------------------------------------------------------------------------


class Manual(Configured):
    def __init__(self, net, **options):
        super().__init__(net, mask=sparsesam.fixed_mask("4.*"), norm="masked", **options)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        opt.zero_grad()
        with opt.first_pass():
            self.manual_backward(super().training_step(batch, batch_idx), inputs=opt.ascent_inputs)
        with opt.perturbed():
            self.manual_backward(super().training_step(batch, batch_idx))
        opt.step()


class ManualClosure(Manual):
    def training_step(self, batch, batch_idx):
        opt = self.optimizers()

        def closure():
            opt.zero_grad()
            loss = Configured.training_step(self, batch, batch_idx)
            self.manual_backward(loss)
            return loss

        opt.step(closure)


@pytest.mark.parametrize("kind", [Manual, ManualClosure])
def test_manual_optimization_equals_plain_loop(kind, tmp_path):
    module = kind(cases.mlp())
    twin = Configured(copy.deepcopy(module.net), **module.options)
    fit(module, quiet(tmp_path))
    assert_same_run(module, twin, plain(twin, batches()))
    savings = module.trainer.optimizers[0].savings()
    assert savings.reused > 0
    assert (savings.gradients > 0.5) is (kind is Manual)  # a closure's own backward computes everything


def test_manual_optimization_in_fp16_equals_plain_loop(tmp_path):
    module = Manual(cases.mlp(torch.float32))
    twin = Configured(copy.deepcopy(module.net), **module.options)
    loader = batches(torch.float32)
    fit(module, {**quiet(tmp_path), "plugins": fp16(SharpnessAwareMixedPrecision)}, loader=loader)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    precision = partial(torch.autocast, "cpu", torch.float16, cache_enabled=False)
    assert_same_run(module, twin, plain(twin, loader, precision=precision, scaler=scaler))


def test_closure_after_perturbed_raises():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model)
    x, y = cases.vectors()
    F.cross_entropy(model(x), y).backward()
    with opt.perturbed():
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"step\(closure\) after perturbed"):
        opt.step(cases.closure_for(model, opt, x, y))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_in_two_phases_equals_plain_loop(precision):
    lightning_fabric = pytest.importorskip("lightning_fabric")
    fabric = lightning_fabric.Fabric(accelerator="cpu", precision=precision)
    module = Configured(cases.mlp(torch.float32), mask=sparsesam.fixed_mask("4.*"), norm="masked")
    twin = copy.deepcopy(module)
    opt = module.configure_optimizers()
    model, prepared = fabric.setup(module.net, opt)
    loader = batches(torch.float32)
    for _ in range(2):
        for x, y in loader:
            prepared.zero_grad()
            with prepared.first_pass():
                fabric.backward(F.cross_entropy(model(x), y))
            with prepared.perturbed():
                fabric.backward(F.cross_entropy(model(x), y))
            prepared.step()
    cast = partial(torch.autocast, "cpu", torch.bfloat16) if precision == "bf16-mixed" else nullcontext
    other = plain(twin, loader, precision=cast)
    torch.testing.assert_close(cases.weights_of(module), cases.weights_of(twin), rtol=1e-6, atol=1e-7)
    assert opt.steps == other.steps == 10


def test_savings_work_in_fabric_closures():
    """Fabric adds a hook to every output, which does nothing in full precision."""
    lightning_fabric = pytest.importorskip("lightning_fabric")
    fabric = lightning_fabric.Fabric(accelerator="cpu")
    x, y = cases.vectors()
    weights = []
    for engine in (True, False):
        module = cases.mlp()
        opt = cases.ssam(module, "4.*", engine=engine)
        model = fabric.setup(module)
        for _ in range(3):
            opt.step(cases.closure_for(model, opt, x, y, backward=fabric.backward))
        weights.append(cases.weights_of(module))
        assert (opt.savings().reused > 0) is engine
    torch.testing.assert_close(*weights, rtol=0, atol=0)


# ---- logging ---------------------------------------------------------------------------------------------


class Logging(Configured):
    """Logs in the first pass alone."""

    seen = ()

    def training_step(self, batch, batch_idx):
        loss = loss_of(self, batch)
        if not self.optimizers().in_second_pass:
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.seen += (loss.item(),)
        return loss


class LoggingOnePass(Logging):
    configure_optimizers = OnePass.configure_optimizers


@pytest.mark.parametrize("kind", [Logging, LoggingOnePass])
@pytest.mark.parametrize("count", [1, 2])
def test_metrics_that_respect_in_second_pass_are_counted_once(count, kind, tmp_path):
    module = kind(cases.mlp(), mask=sparsesam.random_mask(sparsity=0.5))
    options = {**quiet(tmp_path), "max_epochs": 1, "accumulate_grad_batches": count, "callbacks": [AccumulatedAscent()]}
    trainer = fit(module, options)
    assert len(module.seen) == 5
    assert trainer.callback_metrics["loss_epoch"].item() == pytest.approx(sum(module.seen) / 5)
    assert trainer.callback_metrics["loss_step"].item() == pytest.approx(module.seen[-1])


class Remember(pytorch_lightning.loggers.logger.Logger):
    name = version = "remember"

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_hyperparams(self, params, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))


def test_monitor_logs_rho_sparsity_norms_and_counters(tmp_path):
    logger, norms = Remember(), []

    class Clipped(Configured):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            gradients = torch.cat([p.grad.flatten() for p in self.net.parameters()])
            if optimizer.in_second_pass:
                norms.append(gradients.norm().item())

    module = Clipped(cases.mlp(), mask=sparsesam.fixed_mask("4.*"), rho_schedule=sparsesam.Warmup(10))
    options = {**quiet(tmp_path), "logger": logger, "log_every_n_steps": 5, "callbacks": [SharpnessAwareMonitor()]}
    fit(module, options)
    (step, first), (_, second) = [row for row in logger.rows if "sam/rho" in row[1]]
    assert step == 4
    assert (first["sam/rho"], second["sam/rho"]) == (pytest.approx(0.15), pytest.approx(0.3))
    assert first["sam/sparsity"] == pytest.approx(module.trainer.optimizers[0].sparsity)
    assert first["sam/gradient_norm"] == pytest.approx(norms[4])
    assert second["sam/ascent_norm"] == pytest.approx(module.trainer.optimizers[0].last_ascent_norm)
    assert first["sam/skipped_ascents"] == first["sam/skipped_steps"] == 0


@pytest.mark.parametrize("trainer", [pytorch_lightning.Trainer, accumulating], ids=["each batch", "accumulating"])
def test_savings_change_nothing(trainer, tmp_path):
    masked = {"mask": sparsesam.fixed_mask("4.*"), "norm": "masked"}
    module = Configured(cases.mlp(), **masked)
    twin = Configured(copy.deepcopy(module.net), engine=False, **masked)
    for one in (module, twin):
        options = quiet(tmp_path)
        (trainer(options) if trainer is accumulating else trainer(**options)).fit(one, batches())
    assert module.trainer.optimizers[0].savings().reused > 0
    assert_same_run(module, twin, twin.trainer.optimizers[0])
