"""Hugging Face's Trainer and Accelerate reach the weights that a plain loop reaches; nothing is downloaded."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import sparsesam
from tests import cases
from tests.docs import pages

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from sparsesam.integrations.accelerate import AccumulatedPasses  # noqa: E402
from sparsesam.integrations.hugging_face import SharpnessAwareTrainer  # noqa: E402


def language_model(dropout=0.0):
    torch.manual_seed(0)
    size = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **ends, **drops)).double()
    model.loss_type = "ForCausalLM"  # otherwise the Trainer counts the first token of a sentence, which has no loss
    return model


def sentences(count=20):
    tokens = torch.randint(0, 20, (count, 6), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": one, "labels": one} for one in tokens]


def arguments(tmp_path, **options):
    usual = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
    }
    silent = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    return transformers.TrainingArguments(tmp_path, **{**usual, **silent, **options})


def masked(model, **options):
    mask = sparsesam.dynamic_mask(sparsity=0.5, refresh=2)
    return sparsesam.SSAM(cases.sgd(model), model, **{"rho": 0.3, "mask": mask, **options})


def train(model, opt, given, trainer=SharpnessAwareTrainer, **options):
    trainer(model, given, train_dataset=sentences(), optimizers=(opt, None)).train(**options)


def plain(model, opt, *, count=1, clip=1.0):
    """Two epochs of two-phase steps, each over ``count`` batches of four; an epoch's last step may have fewer."""
    model.train()
    tokens = torch.stack([one["input_ids"] for one in sentences()])

    def losses(group):
        count = group[:, 1:].numel()
        return [lambda x=x: model(input_ids=x, labels=x, num_items_in_batch=count).loss for x in group.split(4)]

    for _ in range(2):
        for group in tokens.split(4 * count):
            clips = partial(torch.nn.utils.clip_grad_norm_, model.parameters(), clip)
            cases.over_micro_batches(opt, losses(group), then=clips)


# ---- Trainer ---------------------------------------------------------------------------------------------


def test_documented_trainer_equals_plain_loop(tmp_path):
    model, twin = language_model(), language_model()
    names = {"torch": torch, "sparsesam": sparsesam, "train_set": sentences()}
    pages.run("docs/hugging-face.md", 0, model=model, arguments=arguments(tmp_path), **names)
    plain(twin, sparsesam.SAM(torch.optim.AdamW(twin.parameters(), lr=1e-3), twin, rho=0.05))
    cases.assert_close(model, twin)


LAST = {"mask": sparsesam.fixed_mask("transformer.h.1.*"), "norm": "masked"}


@pytest.mark.parametrize("options", [{}, {"every": 2}, LAST], ids=["every step", "every other step", "last layer"])
def test_micro_batches_equal_plain_loop(options, tmp_path):
    model, twin = language_model(), language_model()
    opt, other = masked(model, **options), masked(twin, engine=False, **options)
    train(model, opt, arguments(tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.1))
    plain(twin, other, count=2, clip=0.1)
    cases.assert_close(model, twin)
    assert opt.steps == other.steps
    cases.assert_same_masks(opt, other)
    assert opt.savings().reused > 0 or options is not LAST


def test_rho_zero_equals_trainer_of_transformers(tmp_path):
    model, twin = language_model(dropout=0.1), language_model(dropout=0.1)
    given = arguments(tmp_path, gradient_accumulation_steps=2)
    train(model, sparsesam.SAM(cases.sgd(model), model, rho=0.0), given)
    train(twin, cases.sgd(twin), given, transformers.Trainer)
    assert cases.same_bits(cases.weights_of(model), cases.weights_of(twin))


def test_resumed_run_equals_uninterrupted(tmp_path):
    whole, half = language_model(dropout=0.1), language_model(dropout=0.1)
    saving = {"save_strategy": "steps", "save_steps": 2, "train_sampling_strategy": "random"}
    opt, other = masked(whole), masked(half)
    train(whole, opt, arguments(tmp_path, gradient_accumulation_steps=2, **saving))
    checkpoint = str(tmp_path / "checkpoint-2")
    train(half, other, arguments(tmp_path, gradient_accumulation_steps=2, **saving), resume_from_checkpoint=checkpoint)
    assert cases.same_bits(cases.weights_of(whole), cases.weights_of(half))
    assert opt.steps == other.steps == 6
    cases.assert_same_masks(opt, other)


def test_schedule_free_base_equals_plain_loop(tmp_path):
    """The Trainer calls the optimizer's train() before every pass."""
    schedulefree = pytest.importorskip("schedulefree")
    model, twin = language_model(), language_model()
    opt, other = (
        sparsesam.SAM(schedulefree.SGDScheduleFree(m.parameters(), lr=0.1), m, rho=0.3) for m in (model, twin)
    )
    train(model, opt, arguments(tmp_path))
    other.train()
    plain(twin, other)
    opt.eval()
    other.eval()
    cases.assert_close(model, twin)


def test_optimizer_of_training_arguments_with_another_trainer(tmp_path):
    names = {"sparsesam": sparsesam, "SharpnessAwareTrainer": SharpnessAwareTrainer}
    mine = pages.run("docs/hugging-face.md", 1, Seq2SeqTrainer=transformers.Seq2SeqTrainer, **names)["Mine"]
    given = transformers.Seq2SeqTrainingArguments(**arguments(tmp_path, learning_rate=0.02).to_dict())
    trainer = mine(language_model(), given, train_dataset=sentences())
    trainer.train()
    opt = trainer.optimizer.optimizer
    assert isinstance(opt.base, torch.optim.AdamW)
    assert (opt.steps, opt.param_groups[0]["lr"]) == (10, 0.02)


def test_rho_sparsity_norm_and_counters_are_logged(tmp_path):
    model = language_model()
    opt = masked(model, rho_schedule=sparsesam.Warmup(10))
    trainer = SharpnessAwareTrainer(
        model, arguments(tmp_path, logging_steps=5), train_dataset=sentences(), optimizers=(opt, None)
    )
    trainer.train()
    first, second = [row for row in trainer.state.log_history if "loss" in row]
    assert (first["sam/rho"], second["sam/rho"]) == (pytest.approx(0.15), pytest.approx(0.3))
    assert first["sam/sparsity"] == pytest.approx(0.5, abs=0.01)
    assert second["sam/ascent_norm"] == opt.last_ascent_norm > 0
    assert first["sam/skipped_steps"] == 0


def llama():
    size = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 4}
    return transformers.LlamaModel(transformers.LlamaConfig(**size, num_attention_heads=2, num_key_value_heads=2))


def t5():
    size = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    return transformers.T5EncoderModel(transformers.T5Config(**size))


@pytest.mark.parametrize(("build", "layer", "count"), [(llama, "LlamaRMSNorm", 5), (t5, "T5LayerNorm", 5)])
def test_rms_norm_of_transformers_is_normalization_layer(build, layer, count):
    model = build()
    found = sparsesam.normalization_layers(model)
    assert list(found.values()) == [layer] * count
    mask = sparsesam.fixed_mask(types=sparsesam.NORMALIZATION)
    opt = sparsesam.SSAM(cases.sgd(model), model, rho=0.1, mask=mask, norm="masked")
    cases.take_step(opt, lambda: model(input_ids=torch.arange(12).view(2, 6))[0].square().mean())
    assert {name for name, mask in opt.masks.items() if mask.any()} == {f"{name}.weight" for name in found}


def test_other_optimizer_raises(tmp_path):
    model = language_model()
    with pytest.raises(TypeError, match="the optimizer must be sparsesam's SAM or SSAM, got SGD"):
        train(model, cases.sgd(model), arguments(tmp_path))


# ---- Accelerate ------------------------------------------------------------------------------------------


def batches():
    return DataLoader(TensorDataset(*cases.vectors(40)), batch_size=8)


def mean_losses(model, group, count):
    return [lambda x=x, y=y: F.cross_entropy(model(x), y) / count for x, y in group]


def test_documented_accelerate_loop_equals_plain_loop():
    model, twin = cases.mlp(), cases.mlp()
    names = {"torch": torch, "sparsesam": sparsesam, "loss_fn": F.cross_entropy, "model": model, "loader": batches()}
    left = pages.run("docs/accelerate.md", 0, accelerator=accelerate.Accelerator(cpu=True), **names)
    opt = sparsesam.SAM(cases.sgd(twin), twin, rho=0.05)
    for batch in batches():
        clip = partial(torch.nn.utils.clip_grad_norm_, twin.parameters(), 1.0)
        cases.over_micro_batches(opt, mean_losses(twin, [batch], 1), then=clip)
    cases.assert_close(model, twin)
    assert left["opt"].steps == 5


@pytest.mark.parametrize("options", [{"mask": "*"}, {"mask": "*", "every": 2}, {"mask": "4.*"}], ids=str)
def test_documented_accumulation_equals_plain_loop(options):
    model, twin = cases.mlp(), cases.mlp()
    opt, other = (cases.ssam(m, **options) for m in (model, twin))
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared = dict(zip(("model", "prepared", "loader"), accelerator.prepare(model, opt, batches()), strict=True))
    pages.run("docs/accelerate.md", 1, accelerator=accelerator, opt=opt, loss_fn=F.cross_entropy, **prepared)
    micro = list(batches())
    for at in range(0, 5, 2):  # the last step has one micro-batch
        cases.over_micro_batches(other, mean_losses(twin, micro[at : at + 2], 2))
    assert opt.steps == other.steps == 3
    assert (opt.savings().gradients > 0.5) is (options["mask"] == "4.*")
    cases.assert_close(model, twin)


def test_micro_batch_that_failed_in_the_first_pass_does_not_run_at_w_plus_e():
    model, twin = cases.mlp(), cases.mlp()
    opt, other = (cases.ssam(m, "*") for m in (model, twin))
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    wrapped, prepared = accelerator.prepare(model, opt)
    passes = AccumulatedPasses(accelerator, wrapped, prepared)
    micro = list(batches())[:3]
    for x, y in micro:
        with accelerator.accumulate(wrapped):
            if x is micro[1][0]:
                with pytest.raises(ValueError, match="batch_size"):
                    passes(lambda x=x, y=y: F.cross_entropy(wrapped(x), y[1:]))
            else:
                passes(lambda x=x, y=y: F.cross_entropy(wrapped(x), y))
            prepared.step()
            prepared.zero_grad()
    cases.over_micro_batches(other, mean_losses(twin, micro[::2], 3))
    assert opt.steps == 1
    cases.assert_close(model, twin)


def test_accelerator_accumulate_around_two_phases_raises():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.3)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared_model, prepared, loader = accelerator.prepare(model, opt, batches())

    def train():
        for x, y in loader:
            with accelerator.accumulate(prepared_model):
                accelerator.backward(F.cross_entropy(prepared_model(x), y))
                with opt.perturbed():
                    accelerator.backward(F.cross_entropy(prepared_model(x), y))
                prepared.step()
                prepared.zero_grad()

    with pytest.raises(RuntimeError, match=r"docs/moving-over\.md"):
        train()


def test_accelerate_saves_and_loads_masks_and_counters(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    model = cases.mlp()
    opt = masked(model)
    model, _ = accelerator.prepare(model, opt)
    cases.train(model, opt, range(1))
    masks, state = opt.masks, tmp_path / "state"
    accelerator.save_state(str(state))
    opt.refresh_mask()
    cases.train(model, opt, range(1))
    accelerator.load_state(str(state))
    assert opt.steps == 1
    assert cases.same_bits(masks.values(), opt.masks.values())
