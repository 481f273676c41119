import json
import os
from pathlib import Path

import pytest
from benchmarks.report import write_run

from sparsesam.lab.experiment.run_directory import seal
from sparsesam.lab.report.read_run import RunRecord, find_runs
from tests.lab.report.made_runs import write_analysis


def test_finished_run(tmp_path):
    run = RunRecord(write_run(tmp_path / "a", optimizer="sam", accuracy=0.8))
    assert (run.status, run.reason, run.problems) == ("finished", "", [])
    assert run.measured("test_accuracy") == 0.8
    assert run.curve("test_loss") == pytest.approx({1: 1.2, 2: 0.6, 3: 0.4})
    assert run.config.optimizer == "sam"
    assert run.provenance["cpu"] == "a chip"


def test_unfinished_run_reports_progress_and_resume_command(tmp_path):
    run = RunRecord(write_run(tmp_path / "a", epochs=2, planned=5, finished=False))
    assert run.status == "unfinished"
    command = f"sparsesam train --resume --out {tmp_path / 'a'}"
    assert run.reason == f"epoch 2 of 5; unless it is running, continue with: {command}"


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        *(("records.jsonl", text, "is damaged") for text in ("[1]", "nonsense", "null")),
        *(("result.json", text, "is damaged") for text in ("", "{", "[]", "null", "\x00")),
        ("result.json", '{"no": "result"}', "has no result; delete it"),
        ("config.yaml", "optimizer: [", "is damaged"),
        ("config.yaml", "optimizer: sam", "is damaged"),  # without its sum
        ("config.yaml", json.dumps(seal({"temperature": 3})), "has settings that this version cannot use"),
    ],
)
def test_run_with_damaged_file_is_unreadable(tmp_path, file, text, problem):
    path = write_run(tmp_path / "a")
    (path / file).write_text(text)
    run = RunRecord(path)
    assert (run.status, run.result, run.epochs, len(run.problems)) == ("unreadable", {}, {}, 1)
    assert f"{file} {problem}" in run.problems[0]


@pytest.mark.parametrize("file", ["config.yaml", "records.jsonl", "result.json", "failure.json", "analyses/a.json"])
def test_pipe_in_place_of_file_does_not_block(tmp_path, file):
    path = write_run(tmp_path / "a")
    (path / "analyses").mkdir()
    (path / file).unlink(missing_ok=True)
    os.mkfifo(path / file)
    assert RunRecord(path).problems == [f"{path / file} must be a file; remove it"]


def test_lost_records_name_the_remedy(tmp_path):
    path = write_run(tmp_path / "a")
    content = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(json.dumps({**content, "records": "of another text"}))
    for damage in (lambda file: file.write_text(file.read_text() + '{"kind": "epo'), Path.unlink):
        damage(path / "records.jsonl")
        (problem,) = RunRecord(path).problems
        assert "records.jsonl" in problem
        assert "continue the run with --resume (a finished one without its result.json)" in problem


@pytest.mark.parametrize("file", ["config.yaml", "records.jsonl", "result.json"])
def test_run_with_file_of_another_or_without_settings_is_unreadable(tmp_path, file):
    path, other = write_run(tmp_path / "a"), write_run(tmp_path / "b", optimizer="sam")
    (path / file).write_text((other / file).read_text())
    (problem,) = RunRecord(path).problems
    assert "of another run" in problem
    (path / "config.yaml").unlink()
    (problem,) = RunRecord(path).problems
    assert "config.yaml is missing" in problem


def test_analyses_are_read_and_unreadable_ones_noted(tmp_path):
    path = write_run(tmp_path / "a")
    write_analysis(path, "hessian", {"trace": None})
    (path / "analyses" / "masks.json").write_text("{")
    (path / "analyses" / "bound.json").write_text('{"result": 1}')
    (path / "analyses" / "sharpness.json").write_text('{"result": {}, "run": "another"}')
    run = RunRecord(path)
    assert list(run.analyses) == ["hessian"]
    words = ("bound.json has no result", "masks.json is damaged", "sharpness.json is of another run, left out")
    assert [expected in problem for expected, problem in zip(words, run.problems, strict=True)] == [True] * 3
    assert run.status == "finished"


def test_runs_are_found_below_directory_or_given_directly(tmp_path):
    first, second = write_run(tmp_path / "sweep" / "a"), write_run(tmp_path / "sweep" / "deep" / "b")
    assert find_runs([tmp_path / "sweep"]) == [first, second]
    assert find_runs([second]) == [second]
    assert find_runs([first, tmp_path, tmp_path / "sweep" / "a" / ".." / "a"]) == [first, second]  # each once
    failed = tmp_path / "sweep" / "c"  # before it could write its settings
    failed.mkdir()
    (failed / "failure.json").write_text("{}")
    assert find_runs([tmp_path]) == [first, failed, second]
    (tmp_path / "sweep" / "analyses").mkdir()  # of `analyze convergence`
    assert find_runs([tmp_path]) == [tmp_path / "sweep", first, failed, second]


def test_circular_links_terminate(tmp_path):
    run = write_run(tmp_path / "a")
    os.symlink(tmp_path, tmp_path / "circle")
    assert find_runs([tmp_path]) == [run]


def test_directories_without_runs_raise(tmp_path):
    with pytest.raises(ValueError, match="has no runs; a run's directory contains a config"):
        find_runs([tmp_path])
