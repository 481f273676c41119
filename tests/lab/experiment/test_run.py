import json
import statistics
from dataclasses import replace

import pytest
import torch

from sparsesam.lab.experiment import checkpoint, read_records
from sparsesam.lab.experiment.config import RunEnvironment
from sparsesam.lab.experiment.errors import DivergedError, Interrupted, RunError
from sparsesam.lab.experiment.result import read_epochs
from sparsesam.lab.experiment.run import run_training
from sparsesam.lab.experiment.run_directory import RunDirectory
from sparsesam.lab.experiment.training import Training
from tests.lab.experiment.runs import SHORT, InterruptAt, same, state, train

STATEFUL = {
    "ssam-f": {"optimizer": "ssam-f"},
    "ssam-d with momentum and an average": {"optimizer": "ssam-d", "ema": 0.9, "mask_steps": 3},
    "adamw": {"optimizer": "adamw", "lr": 0.001},
    "dropout": {"optimizer": "sam", "model": "tests.lab.experiment.test_run:with_dropout"},
}


def with_dropout(num_classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(64, num_classes))


def test_writes_settings_records_checkpoints_and_result_with_provenance(tmp_path):
    before = torch.random.get_rng_state()
    result = train(tmp_path)
    assert torch.equal(before, torch.random.get_rng_state())
    assert RunDirectory(tmp_path).saved_config() == SHORT
    header, *epochs, last = read_records(tmp_path / "records.jsonl")
    assert header["kind"] == "run"
    assert header["provenance"]["threads"] == 1
    assert [record["epoch"] for record in epochs] == [1, 2, 3]
    assert last["kind"] == "result"
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved["hash"] == SHORT.content_hash
    assert saved["result"]["test_accuracy"] == result.test_accuracy == epochs[-1]["test_accuracy"]


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("step", [2, 5])  # within the first epoch, and at its end
def test_resumed_run_equals_uninterrupted(tmp_path, name, step):
    train(tmp_path / "whole", **STATEFUL[name])
    with pytest.raises(Interrupted, match=r"continue with: sparsesam train --resume --out"):
        train(tmp_path / "parts", InterruptAt(step), **STATEFUL[name])
    train(tmp_path / "parts", resume=True, **STATEFUL[name])
    assert same(state(tmp_path / "parts"), state(tmp_path / "whole"))


def test_without_perturbation_every_optimizer_is_its_base(tmp_path):
    train(tmp_path / "sgd")
    for name in ("sam", "ssam-f", "ssam-d"):
        train(tmp_path / name, optimizer=name, rho=0.0)
        assert same(state(tmp_path / name)["training"]["model"], state(tmp_path / "sgd")["training"]["model"])


def test_same_seed_repeats_and_another_differs(tmp_path):
    for name, seed in (("once", 5), ("again", 5), ("other", 6)):
        train(tmp_path / name, seed=seed, label_noise=0.3, corruption_rate=0.5)
    once, again, other = (state(tmp_path / name)["training"]["model"] for name in ("once", "again", "other"))
    assert same(once, again)
    assert not torch.equal(once["0.weight"], other["0.weight"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_keeps_float32_weights(tmp_path, precision):
    assert train(tmp_path, precision=precision, max_steps=2, **STATEFUL["dropout"]).train_loss < 10
    content = state(tmp_path)["training"]
    assert content["model"]["2.weight"].dtype == torch.float32
    assert (content["scaler"] is not None) == (precision == "fp16")


def test_non_finite_loss_stops_with_last_good_state_reason_and_hint(tmp_path, monkeypatch):
    with pytest.raises(DivergedError, match=r"lower lr \(1e\+30\)"):
        train(tmp_path / "first step", lr=1e30)
    assert "DivergedError" in json.loads((tmp_path / "first step" / "failure.json").read_text())["error"]
    with pytest.raises(Interrupted):
        train(tmp_path / "later", InterruptAt(6))
    monkeypatch.setattr("sparsesam.lab.experiment.training.lr_factor", lambda *_: 1e30)
    before = (tmp_path / "later" / "last.pt").read_bytes()
    with pytest.raises(DivergedError, match=r"the last good checkpoint is .*last\.pt"):
        train(tmp_path / "later", resume=True)
    assert (tmp_path / "later" / "last.pt").read_bytes() == before


def test_two_runs_in_one_directory_are_rejected(tmp_path):
    with RunDirectory(tmp_path).locked(), pytest.raises(RunError, match="in use by another process"):
        train(tmp_path)


def test_directory_with_run_is_not_overwritten(tmp_path):
    with pytest.raises(Interrupted):
        train(tmp_path, InterruptAt(6))
    with pytest.raises(ValueError, match="has an unfinished run; continue it with --resume"):
        train(tmp_path)
    with pytest.raises(ValueError, match=r"other settings \(lr: 0.05, now 0.1\)"):
        train(tmp_path, resume=True, lr=0.1)
    train(tmp_path, resume=True)
    with pytest.raises(ValueError, match="has a finished run"):
        train(tmp_path, resume=True)


def test_losses_and_statistics_cover_whole_batch_with_ascent_fraction(tmp_path):
    """With rho 0 the loss at w + e is the one at w."""
    for fraction in (1.0, 0.25):
        train(tmp_path / str(fraction), optimizer="sam", rho=0.0, ascent_fraction=fraction)
    whole, part = (read_epochs(tmp_path / name / "records.jsonl") for name in ("1.0", "0.25"))
    for name in ("train_loss", "train_accuracy"):
        of_whole, of_part = ([getattr(epoch, name) for epoch in epochs] for epochs in (whole, part))
        assert of_part == pytest.approx(of_whole, rel=1e-5)
    whole, part = (state(tmp_path / name)["training"]["model"] for name in ("1.0", "0.25"))
    running = [name for name in whole if "running" in name]
    assert running
    for name in running:
        torch.testing.assert_close(part[name], whole[name])


def test_step_times_are_recorded_on_request(tmp_path):
    with pytest.raises(Interrupted):
        train(tmp_path / "with", InterruptAt(2), optimizer="ssam-f", record_times=True)
    result = train(tmp_path / "with", resume=True, optimizer="ssam-f", record_times=True)
    epochs = read_epochs(tmp_path / "with" / "records.jsonl")
    seconds = [time for epoch in epochs for time in epoch.step_seconds]
    assert [len(epoch.step_seconds) for epoch in epochs] == [5, 5, 5]
    masks = [time for epoch in epochs for time in epoch.mask_seconds]
    assert 0 < sum(seconds) + sum(masks) < result.seconds
    assert result.warm_seconds_per_step == statistics.median(seconds[5:])
    assert result.warm_seconds_per_epoch == pytest.approx(5 * result.warm_seconds_per_step)
    assert result.seconds_per_mask == statistics.median(masks[1:])
    without = train(tmp_path / "without", optimizer="ssam-f")
    assert without.warm_seconds_per_step is None
    assert read_epochs(tmp_path / "without" / "records.jsonl")[0].step_seconds == []


def test_run_killed_during_test_repeats_epoch(tmp_path, monkeypatch):
    place = RunEnvironment(out=tmp_path, threads=1, logger="none", checkpoint_steps=1)

    def killed(self, split):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Training, "evaluate", killed)
        with pytest.raises(MemoryError):
            run_training(SHORT, place)
    run_training(SHORT, replace(place, resume=True))
    assert [record.epoch for record in read_epochs(tmp_path / "records.jsonl")] == [1, 2, 3]


def test_run_with_one_step_per_epoch_can_be_stopped(tmp_path):
    with pytest.raises(Interrupted):
        train(tmp_path, InterruptAt(2), train_size=16, epochs=9)
    assert checkpoint.load(tmp_path / "last.pt")["training"]["position"]["epoch"] == 3  # interrupted after its second
