import json

from sparsesam.lab.report.read_run import read_run
from sparsesam.lab.report.write import build_report, read_calibrations
from tests.lab.report.made_runs import write_calibration, write_run


def test_the_file_beside_the_runs_is_read_once(tmp_path):
    runs = [write_run(tmp_path / name, optimizer=name) for name in ("sgd", "sam")]
    write_calibration(tmp_path, runs, [1.0, 2.0])
    problems = []
    (found,) = read_calibrations(map(read_run, runs), problems)
    assert sorted(one.seconds_per_epoch for one in found.variants.values()) == [1.0, 2.0]
    assert problems == []


def test_a_file_in_another_format_is_noted(tmp_path):
    run = write_run(tmp_path / "a")
    for content in ("{", json.dumps({"variants": 3})):
        (tmp_path / "calibration.json").write_text(content)
        data, _ = build_report([run])
        assert data.calibrations == []
        assert "calibration.json" in data.problems[0][1]
