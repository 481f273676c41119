"""Damaged, missing and swapped files of a run: one line that names the file, or the right result."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import yaml

from sparsesam.lab.cli import main
from sparsesam.lab.experiment import read_masks, read_records
from sparsesam.lab.experiment.errors import Interrupted, RunError
from sparsesam.lab.experiment.result import read_result
from sparsesam.lab.experiment.run_directory import RunDirectory
from tests.lab.experiment.runs import InterruptAt, same, state, train, words

SPARSE = {"optimizer": "ssam-f", "mask_steps": 3, "model": "tests.lab.inspection.networks:linear"}
OPTIONS = words(train_size=72, test_size=40, epochs=3, batch_size=16, threads=1)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A finished run, one stopped in its second epoch, and one of another seed."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "finished", **SPARSE)
    with pytest.raises(Interrupted):
        train(folder / "stopped", InterruptAt(8), **SPARSE)
    train(folder / "other", seed=1, **SPARSE)
    return folder


@pytest.fixture
def runs(originals, tmp_path):
    shutil.copytree(originals, tmp_path / "runs")
    return tmp_path / "runs"


def resumed(run):
    return train(run, resume=True, **SPARSE)


def halve(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def replace_by_other(file):
    shutil.copy(file.parents[1] / "other" / file.name, file)


@pytest.mark.parametrize("damage", [halve, Path.unlink, replace_by_other])
def test_lost_records_are_written_again_from_checkpoint(runs, damage):
    (runs / "finished" / "result.json").unlink()
    before = (runs / "finished" / "records.jsonl").read_text().splitlines()[:4]
    expected = json.loads((runs / "other" / "result.json").read_text()).keys()
    damage(runs / "finished" / "records.jsonl")
    resumed(runs / "finished")
    assert (runs / "finished" / "records.jsonl").read_text().splitlines()[:4] == before
    assert json.loads((runs / "finished" / "result.json").read_text()).keys() == expected


def test_damaged_settings_stop_in_one_line(runs, capsys):
    halve(runs / "stopped" / "config.yaml")
    assert main(["train", "--resume", "--out", str(runs / "stopped")]) == 1
    printed = capsys.readouterr().err
    assert "config.yaml is damaged (" in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("config.yaml", replace_by_other, "started with other settings"),
        ("last.pt", replace_by_other, r"last\.pt or .* is of another run"),
        ("last.pt", Path.unlink, r"last\.pt is missing, although best\.pt came after it"),
        ("best.pt", Path.unlink, r"best\.pt is missing or not of the best epoch"),
        ("best.pt", replace_by_other, r"best\.pt or .* is of another run"),
        ("masks/00000006.pt", halve, r"00000006\.pt is damaged or truncated"),
    ],
)
def test_run_with_damaged_missing_or_foreign_file_does_not_resume(runs, name, damage, reason):
    damage(runs / "stopped" / name)
    with pytest.raises((RunError, ValueError), match=reason):
        resumed(runs / "stopped")


@pytest.mark.parametrize(
    ("names", "damage", "reason"),
    [
        (["last.pt"], halve, r"last\.pt is damaged"),
        (["last.pt", "best.pt"], Path.unlink, r"last\.pt is missing, although result\.json came after it"),
    ],
)
def test_finished_run_with_damaged_or_missing_checkpoints_is_not_extended_and_stays(runs, names, damage, reason):
    kept = [runs / "finished" / name for name in ("config.yaml", "result.json")]
    before = [file.read_text() for file in kept]
    for name in names:
        damage(runs / "finished" / name)
    with pytest.raises(RunError, match=reason):
        train(runs / "finished", resume=True, epochs=9, **SPARSE)
    assert [file.read_text() for file in kept] == before


def test_weights_of_another_run_are_neither_evaluated_nor_exported(runs):
    replace_by_other(runs / "stopped" / "best.pt")
    assert main(["eval", str(runs / "stopped")]) == 1
    assert main(["export", str(runs / "stopped"), "-o", str(runs / "weights.pt")]) == 1


@pytest.mark.parametrize("killed_in", ["_save", "_save_best"])
def test_run_killed_before_its_first_last_or_best_checkpoint_resumes(runs, tmp_path, killed_in):
    killed = mock.patch(f"sparsesam.lab.experiment.run.RunRecorder.{killed_in}", side_effect=KeyboardInterrupt)
    with killed, pytest.raises(KeyboardInterrupt):
        train(tmp_path / "begun", **SPARSE)
    assert len(read_records(tmp_path / "begun" / "records.jsonl")) == 2
    resumed(tmp_path / "begun")
    assert same(state(tmp_path / "begun"), state(runs / "finished"))
    assert (tmp_path / "begun" / "best.pt").exists()


def test_resumed_run_removes_files_that_were_not_written_to_their_end(runs):
    (runs / "stopped" / "failure.json.part").write_text("{")
    (runs / "stopped" / "masks" / "00000099.pt.part").write_text("half")
    resumed(runs / "stopped")
    assert not list((runs / "stopped").rglob("*.part"))


def test_missing_mask_or_one_of_another_step_or_run_stops(runs):
    masks = runs / "finished" / "masks"
    shutil.copy(masks / "00000003.pt", masks / "00000006.pt")
    with pytest.raises(RunError, match=r"00000006\.pt has the masks of step 3"):
        list(read_masks(runs / "finished"))
    shutil.copy(runs / "other" / "masks" / "00000006.pt", masks / "00000006.pt")
    with pytest.raises(RunError, match=r"00000006\.pt or .* is of another run"):
        list(read_masks(runs / "finished"))
    (masks / "00000006.pt").unlink()
    with pytest.raises(RunError, match="has 4 of 5 masks"):
        list(read_masks(runs / "finished"))


def test_changed_or_foreign_result_stops(runs):
    file, mine = runs / "finished" / "result.json", RunDirectory(runs / "finished").saved_config().content_hash
    text = file.read_text()
    accuracy = read_result(file, mine).test_accuracy
    file.write_text(text.replace(f'"test_accuracy": {accuracy}', '"test_accuracy": 0.99'))
    with pytest.raises(RunError, match=r"result\.json is damaged \(its sum"):
        read_result(file, mine)
    replace_by_other(file)
    with pytest.raises(RunError, match="result of another run"):
        read_result(file, mine)


def test_every_setting_is_kept_for_resumed_run(tmp_path):
    run, model = tmp_path / "run", "tests.lab.experiment.test_run:with_dropout"
    options = words(optimizer="sgd", model=model, logger="none", checkpoint_steps=2, quiet="true", max_steps=5)
    assert main(["train", *OPTIONS, *options, "--out", str(run)]) == 0
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert (saved["logger"], saved["threads"], saved["checkpoint_steps"]) == ("none", 1, 2)
    assert main(["train", "--resume", "--out", str(run), "--epochs", "4"]) == 0
    assert not (run / "tensorboard").exists()
    assert yaml.safe_load((run / "config.yaml").read_text())["checkpoint_steps"] == 2
