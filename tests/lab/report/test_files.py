import os

import pytest

from sparsesam.lab.report.files import find_runs
from tests.lab.report.made_runs import write_run


def test_runs_are_found_below_a_directory_and_given_themselves(tmp_path):
    first, second = write_run(tmp_path / "sweep" / "a"), write_run(tmp_path / "sweep" / "deep" / "b")
    assert find_runs([tmp_path / "sweep"]) == [first, second]
    assert find_runs([second]) == [second]


def test_a_run_given_twice_is_there_once(tmp_path):
    run = write_run(tmp_path / "a")
    assert find_runs([run, tmp_path, tmp_path / "a" / ".." / "a"]) == [run]


def test_a_run_that_died_before_its_settings_were_written_is_found(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "failure.json").write_text("{}")
    assert find_runs([tmp_path]) == [tmp_path / "a"]


def test_links_in_circles_end(tmp_path):
    run = write_run(tmp_path / "a")
    os.symlink(tmp_path, tmp_path / "circle")
    assert find_runs([tmp_path]) == [run]


def test_places_without_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has no runs; a run's directory has a config"):
        find_runs([tmp_path])
    with pytest.raises(ValueError, match=r"RUNS must be directories, got .*nowhere"):
        find_runs([tmp_path / "nowhere"])
