import os

import pytest
from benchmarks.report import write_run

from sparsesam.lab.report.read_run import RunRecord, find_runs
from tests.lab.report.made_runs import write_analysis


def test_finished_run(tmp_path):
    run = RunRecord(write_run(tmp_path / "a", optimizer="sam", accuracy=0.8))
    assert (run.status, run.reason, run.problems) == ("finished", "", [])
    assert run.measured("test_accuracy") == 0.8
    assert run.curve("test_loss") == pytest.approx({1: 1.2, 2: 0.6, 3: 0.4})
    assert run.config.optimizer == "sam"
    assert run.provenance["cpu"] == "a chip"


def test_failed_run_reports_reason(tmp_path):
    run = RunRecord(write_run(tmp_path / "a", failure="DivergedError: the loss is nan"))
    assert (run.status, run.reason) == ("failed", "DivergedError: the loss is nan")


def test_unfinished_run_reports_progress_and_resume_command(tmp_path):
    run = RunRecord(write_run(tmp_path / "a", epochs=2, planned=5, finished=False))
    assert run.status == "unfinished"
    assert run.reason == f"stopped after epoch 2 of 5; continue with: sparsesam train --resume --out {tmp_path / 'a'}"
    (tmp_path / "a" / "running.json").write_text('{"pid": 7, "host": "here"}')
    assert "process 7 on here is running it, or was killed" in RunRecord(tmp_path / "a").reason


def test_truncated_line_is_noted_and_others_are_read(tmp_path):
    path = write_run(tmp_path / "a", finished=False)
    with (path / "records.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "epo')
    run = RunRecord(path)
    assert len(run.epochs) == 3
    assert run.problems == ["records.jsonl: 1 of 5 lines cannot be read (line 5), left out"]


@pytest.mark.parametrize("text", ["[1]", "", "nonsense", "null", '{"kind": "epoch"}', '{"kind": "epoch", "epoch": []}'])
def test_unexpected_records_are_noted(tmp_path, text):
    path = write_run(tmp_path / "a", finished=False)
    (path / "records.jsonl").write_text(text)
    run = RunRecord(path)
    assert (run.status, run.epochs) == ("unfinished", {})
    assert "records.jsonl" in run.problems[0]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"result": 3}', "\x00"])
def test_unreadable_result_means_unfinished_run(tmp_path, text):
    path = write_run(tmp_path / "a")
    (path / "result.json").write_text(text)
    assert RunRecord(path).status == "unfinished"


def test_unreadable_settings_are_taken_from_records(tmp_path):
    path = write_run(tmp_path / "a", optimizer="sam")
    (path / "config.yaml").write_text("optimizer: [")
    run = RunRecord(path)
    assert run.config.optimizer == "sam"
    assert "config.yaml cannot be read: while parsing" in run.problems[0]


def test_settings_of_another_version_are_reported(tmp_path):
    path = write_run(tmp_path / "a")
    for name in ("config.yaml", "records.jsonl"):
        (path / name).unlink()
    text = (path / "result.json").read_text()
    (path / "result.json").write_text(text.replace('"config": {', '"config": {"temperature": 3, '))
    run = RunRecord(path)
    assert (run.status, run.config) == ("finished", None)
    assert "not valid in this version of sparsesam: unknown option 'temperature'" in run.problems[0]


def test_pipe_in_place_of_records_does_not_block(tmp_path):
    path = write_run(tmp_path / "a", finished=False)
    (path / "records.jsonl").unlink()
    os.mkfifo(path / "records.jsonl")
    assert RunRecord(path).epochs == {}


def test_analyses_are_read_and_unreadable_ones_noted(tmp_path):
    path = write_run(tmp_path / "a")
    write_analysis(path, "hessian", {"trace": None})
    (path / "analyses" / "masks.json").write_text("{")
    (path / "analyses" / "bound.json").write_text('{"result": 1}')
    run = RunRecord(path)
    assert list(run.analyses) == ["hessian"]
    assert [problem.partition(" ")[0] for problem in run.problems] == ["analyses/bound.json", "masks.json"]


def test_directory_of_analyses_is_not_a_run(tmp_path):
    write_analysis(tmp_path / "theory", "convergence", {})
    assert RunRecord(tmp_path / "theory").status == "analyses only"


def test_runs_are_found_below_directory_or_given_directly(tmp_path):
    first, second = write_run(tmp_path / "sweep" / "a"), write_run(tmp_path / "sweep" / "deep" / "b")
    assert find_runs([tmp_path / "sweep"]) == [first, second]
    assert find_runs([second]) == [second]
    assert find_runs([first, tmp_path, tmp_path / "sweep" / "a" / ".." / "a"]) == [first, second]  # each once
    failed = tmp_path / "sweep" / "c"  # before it could write its settings
    failed.mkdir()
    (failed / "failure.json").write_text("{}")
    assert find_runs([tmp_path]) == [first, failed, second]


def test_circular_links_terminate(tmp_path):
    run = write_run(tmp_path / "a")
    os.symlink(tmp_path, tmp_path / "circle")
    assert find_runs([tmp_path]) == [run]


def test_directories_without_runs_raise(tmp_path):
    with pytest.raises(ValueError, match="has no runs; a run's directory contains a config"):
        find_runs([tmp_path])
    with pytest.raises(ValueError, match=r"RUNS must be directories, got .*nowhere"):
        find_runs([tmp_path / "nowhere"])
