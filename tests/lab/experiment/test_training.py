"""Validation, accumulation, clipping and schedules, by their effect on the weights and records."""

import pickle
from dataclasses import replace

import pytest
import torch
from lightning_fabric import Fabric
from torch import nn

from sparsesam.lab.data import load_dataset
from sparsesam.lab.experiment import checkpoint, read_records, run
from sparsesam.lab.experiment.batches import Batch
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.optimizers import lr_factor
from sparsesam.lab.experiment.result import read_epochs
from sparsesam.lab.experiment.training import loss_and_accuracy
from tests.lab.experiment.runs import SHORT, state, train

PLAIN = "tests.lab.experiment.networks:plain"


def epochs(out):
    return read_epochs(out / "records.jsonl")


@pytest.mark.parametrize(("val_size", "chosen_on"), [(50, "val"), (None, "test")])
def test_best_weights_are_chosen_on_validation_images_or_else_test_images(tmp_path, val_size, chosen_on):
    result = train(tmp_path, val_size=val_size, epochs=6, lr=0.3)
    accuracies = [getattr(epoch, f"{chosen_on}_accuracy") for epoch in epochs(tmp_path)]
    best = checkpoint.load(tmp_path / "best.pt")
    assert best["epoch"] == result.best_epoch == accuracies.index(max(accuracies)) + 1
    tested = epochs(tmp_path)[best["epoch"] - 1].test_accuracy
    assert result.best_test_accuracy == best["test_accuracy"] == tested
    assert result.best_chosen_on == chosen_on


@pytest.mark.parametrize("optimizer", ["sgd", "sam", "ssam-f"])
def test_accumulated_parts_give_gradient_of_whole_batch(tmp_path, optimizer):
    for parts in (1, 3):
        train(tmp_path / str(parts), optimizer=optimizer, model=PLAIN, accumulate=parts)
    whole, parts = (state(tmp_path / name)["training"]["model"] for name in ("1", "3"))
    torch.testing.assert_close(whole, parts, rtol=1e-9, atol=1e-11)


def test_uneven_micro_batches_differ_by_at_most_one_image(tmp_path):
    """Batch normalization would fail on a micro-batch of one image."""
    sizes = []

    def record(module, args):
        if isinstance(module, nn.BatchNorm2d) and module.training:
            sizes.append(len(args[0]))

    with nn.modules.module.register_module_forward_pre_hook(record):
        train(tmp_path, optimizer="sgd", model="vgg-small", batch_size=13, train_size=26, accumulate=4, max_steps=2)
    assert set(sizes) == {3, 4, 13}  # the cost is measured with a whole batch
    assert sizes.count(3) == 3 * sizes.count(4)


def test_step_gradient_is_clipped_and_perturbation_is_not(tmp_path):
    """Without momentum, a step is at most lr times the largest norm."""
    settings = {"optimizer": "sam", "model": PLAIN, "momentum": 0.0, "weight_decay": 0.0, "lr_schedule": "constant"}
    train(tmp_path / "start", **settings, lr=0.0, max_steps=1)
    train(tmp_path / "clipped", **settings, lr=1.0, max_steps=1, clip_grad_norm=0.01)
    start, clipped = (state(tmp_path / name)["training"]["model"] for name in ("start", "clipped"))
    moved = torch.cat([(clipped[name] - start[name]).flatten() for name in start]).norm()
    assert moved == pytest.approx(0.01, rel=1e-4)


def test_step_schedule_lowers_learning_rate_at_milestones(tmp_path):
    train(tmp_path, lr=0.1, epochs=4, lr_schedule="step", lr_milestones=[1, 3], lr_gamma=0.5)
    assert [epoch.lr for epoch in epochs(tmp_path)] == pytest.approx([0.1, 0.05, 0.05, 0.025])
    config = TrainConfig(lr_schedule="step", lr_milestones=(2,), warmup_epochs=1)
    assert [lr_factor(config, step, 4) for step in (0, 3, 7, 8)] == pytest.approx([0.25, 1, 1, 0.1])


@pytest.mark.parametrize(
    ("settings", "factors"),
    [
        ({}, [0.25, 0.5, 0.75, 1, 1, 0.5]),
        ({"warmup_first": 0.1}, [0.1, 0.4, 0.7, 1, 1, 0.5]),
        ({"warmup_first": 0.0, "lr_final": 0.2}, [0, 1 / 3, 2 / 3, 1, 1, 0.6]),
    ],
)
def test_warm_up_starts_at_first_rate_and_cosine_ends_at_final(settings, factors):
    config = TrainConfig(warmup_epochs=1, epochs=3, **settings)
    assert [lr_factor(config, step, 4) for step in (0, 1, 2, 3, 4, 8)] == pytest.approx(factors)
    assert lr_factor(config, 12, 4) == pytest.approx(config.lr_final)


def test_top_5_accuracy_counts_labels_among_five_largest_scores(tmp_path):
    model = nn.Flatten()  # the scores of an image are its pixels
    images, labels = torch.arange(8.0).expand(8, 8), torch.arange(8)
    _, right, among_five, count = loss_and_accuracy(
        model, [Batch(images, labels, 8)], Fabric(accelerator="cpu")
    ).tolist()
    assert (right, among_five, count) == (1, 5, 8)
    result = train(tmp_path, max_steps=1)
    assert result.test_accuracy <= result.test_top5_accuracy <= 1


def test_tf32_is_allowed_during_run_only(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(run, "make_training", lambda *_: seen.append(torch.get_float32_matmul_precision()) or 1 / 0)
    for precision in ("fp32", "tf32"):
        with pytest.raises(ZeroDivisionError):
            train(tmp_path, precision=precision)
    assert seen == ["highest", "high"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_more_epochs_extend_finished_run(tmp_path):
    train(tmp_path, epochs=2)
    assert train(tmp_path, resume=True, epochs=3).epochs == 3
    kinds = [record["kind"] for record in read_records(tmp_path / "records.jsonl")]
    assert kinds == ["run", "epoch", "epoch", "resume", "epoch", "result"]
    extended = read_records(tmp_path / "records.jsonl")[3]
    assert (extended["config"]["epochs"], extended["step"]) == (3, 10)


def test_run_keeps_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run.run_training(replace(SHORT, max_steps=1), RunEnvironment(name="my run", logger="none"))
    assert read_records(tmp_path / "runs" / "my run" / "records.jsonl")[0]["name"] == "my run"


@pytest.mark.parametrize("optimizer", ["sgd", "sam", "ssam-f", "ssam-d", "auto"])
def test_the_optimizer_of_a_training_pickles(optimizer):
    config, environment = replace(SHORT, optimizer=optimizer, clip_grad_norm=1.0), RunEnvironment(accelerator="cpu")
    fabric = run.make_fabric(config, environment)
    training = run.make_training(config, load_dataset("digits"), fabric, environment)
    training.advance(lambda: True)
    copy = pickle.loads(pickle.dumps(training.optimizer))
    assert copy.state_dict().keys() == training.optimizer.state_dict().keys()
