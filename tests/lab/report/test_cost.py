import json

from sparsesam.lab.report.data import ReportData
from tests.lab.report.made_runs import write_calibration, write_run


def cost(*paths):
    data = ReportData(paths)
    (task,), found = data.tasks, data.cost_of(data.tasks[0])
    assert data.problems == []
    return found, {variant.label: found.values[variant] for variant in task.variants}


def with_passes(path, passes):
    content = json.loads((path / "result.json").read_text())
    content["result"]["forward_backwards_per_step"] = passes
    (path / "result.json").write_text(json.dumps(content))
    return path


def test_times_of_runs_that_were_not_measured_together_are_not_compared(tmp_path):
    found, values = cost(
        write_run(tmp_path / "a", optimizer="sgd", seconds=2.0),
        write_run(tmp_path / "b", optimizer="sam", seconds=1.5),
    )
    assert values == {"SGD": 1.0, "SAM": 2.0}
    assert found.axis == "forward-backward passes / SGD’s"
    assert "not time" in found.explanation


def test_times_of_a_calibration_are_compared(tmp_path):
    runs = [write_run(tmp_path / name, optimizer=name, seed=3) for name in ("sgd", "sam")]
    write_calibration(tmp_path, runs, [2.0, 3.5])
    found, values = cost(*runs)
    assert values == {"SGD": 1.0, "SAM": 1.75}
    assert found.axis == "time of a run / SGD’s"
    assert "measured together, in turns on a chip" in found.explanation


def test_a_longer_run_costs_more(tmp_path):
    runs = [write_run(tmp_path / str(epochs), optimizer="sgd", epochs=epochs) for epochs in (3, 6)]
    assert sorted(cost(*runs)[1].values()) == [1.0, 2.0]
    write_calibration(tmp_path, runs, [2.0, 2.0])
    assert sorted(cost(*runs)[1].values()) == [1.0, 2.0]


def test_a_calibration_that_lacks_a_variant_is_not_mixed_with_other_times(tmp_path):
    runs = [write_run(tmp_path / name, optimizer=name) for name in ("sgd", "sam", "asam")]
    write_calibration(tmp_path, runs[:2], [2.0, 3.5])
    assert cost(*runs)[1] == {"SGD": 1.0, "SAM": 2.0, "ASAM": 2.0}


def test_passes_are_those_that_were_counted(tmp_path):
    found, values = cost(
        with_passes(write_run(tmp_path / "a", optimizer="sgd"), 0.9),
        with_passes(write_run(tmp_path / "b", optimizer="ssam-f"), 1.8),
    )
    assert values == {"SGD": 1.0, "SSAM-F": 2.0}
    assert "masks included" in found.explanation
