import json

import pytest

from sparsesam.lab.report.data import ReportData
from tests.lab.report.made_runs import write_calibration, write_run


def cost(*paths):
    data = ReportData(paths)
    (task,), found = data.tasks, data.tasks[0].cost
    assert data.problems == []
    return found, {variant.label: found.values[variant] for variant in task.variants}


def with_passes(path, passes):
    content = json.loads((path / "result.json").read_text())
    content["result"]["forward_backwards_per_step"] = passes
    (path / "result.json").write_text(json.dumps(content))
    return path


def test_times_not_measured_together_are_not_compared(tmp_path):
    found, values = cost(
        write_run(tmp_path / "a", optimizer="sgd", seconds=2.0),
        write_run(tmp_path / "b", optimizer="sam", seconds=1.5),
    )
    assert values == {"SGD": 1.0, "SAM": 2.0}
    assert found.axis == "forward-backward passes / SGD’s"
    assert "not in time" in found.explanation


def test_times_of_calibration_are_compared(tmp_path):
    runs = [write_run(tmp_path / name, optimizer=name, seed=3) for name in ("sgd", "sam")]
    write_calibration(tmp_path, runs, [2.0, 3.5])
    found, values = cost(*runs)
    assert values == {"SGD": 1.0, "SAM": 1.75}
    assert found.axis == "time of a run / SGD’s"
    assert "measured together, interleaved on a chip" in found.explanation


def test_longer_run_costs_more(tmp_path):
    runs = [write_run(tmp_path / str(epochs), optimizer="sgd", epochs=epochs) for epochs in (3, 6)]
    assert sorted(cost(*runs)[1].values()) == [1.0, 2.0]
    write_calibration(tmp_path, runs, [2.0, 2.0])
    assert sorted(cost(*runs)[1].values()) == [1.0, 2.0]


def test_calibration_that_lacks_variant_is_not_mixed_with_other_times(tmp_path):
    runs = [write_run(tmp_path / name, optimizer=name) for name in ("sgd", "sam", "asam")]
    write_calibration(tmp_path, runs[:2], [2.0, 3.5])
    assert cost(*runs)[1] == {"SGD": 1.0, "SAM": 2.0, "ASAM": 2.0}


def test_counted_passes_are_used(tmp_path):
    found, values = cost(
        with_passes(write_run(tmp_path / "a", optimizer="sgd"), 0.9),
        with_passes(write_run(tmp_path / "b", optimizer="ssam-f"), 1.8),
    )
    assert values == {"SGD": 1.0, "SSAM-F": 2.0}
    assert "including masks" in found.explanation


# ---- which variant to choose


def recommended(tmp_path, **accuracies):
    """Of the optimizers with these accuracies, one per seed."""
    paths = [
        write_run(tmp_path / f"{name}{seed}", optimizer=name.replace("_", "-"), seed=seed, accuracy=accuracy)
        for name, values in accuracies.items()
        for seed, accuracy in enumerate(values)
    ]
    (task,) = ReportData(paths).tasks
    return task.recommendation


def test_most_accurate_is_chosen_if_nothing_cheaper_is_close(tmp_path):
    found = recommended(tmp_path, sgd=[0.80, 0.81], sam=[0.90, 0.92])
    assert found.chosen is found.best
    assert found.sentence == (
        "Best choice: SAM, 91.0 ± 1.4 % at 2.00 × SGD’s passes. It has the highest mean accuracy."
    )


def test_cheapest_that_seeds_cannot_distinguish_from_best_is_chosen(tmp_path):
    found = recommended(tmp_path, sgd=[0.90, 0.92, 0.91], sam=[0.91, 0.92, 0.93])
    assert (found.chosen.label, found.best.label) == ("SGD", "SAM")
    assert "the difference is not significant" in found.sentence


def test_differences_are_paired_by_seed(tmp_path):
    found = recommended(tmp_path, sgd=[0.80, 0.90, 0.85], sam=[0.81, 0.9101, 0.8599])
    assert found.chosen.label == "SAM"


def test_two_seeds_are_too_few_to_choose_cheaper_one(tmp_path):
    found = recommended(tmp_path, sgd=[0.9099, 0.91], sam=[0.90, 0.921])
    assert found.chosen.label == "SAM"


@pytest.mark.parametrize("accuracies", [{}, {"sam": [0.9, 0.91]}])
def test_single_variant_is_not_recommended(tmp_path, accuracies):
    if accuracies:
        assert recommended(tmp_path, **accuracies) is None


# ---- the times that sweeps measured


def test_file_beside_runs_is_read_once(tmp_path):
    runs = [write_run(tmp_path / name, optimizer=name) for name in ("sgd", "sam")]
    write_calibration(tmp_path, runs, [1.0, 2.0])
    data = ReportData(runs)
    (found,) = data.calibrations
    assert sorted(one.seconds_per_epoch for one in found.variants.values()) == [1.0, 2.0]
    assert data.problems == []


def test_file_in_another_format_is_noted(tmp_path):
    run = write_run(tmp_path / "a")
    for content in ("{", json.dumps({"variants": 3})):
        (tmp_path / "calibration.json").write_text(content)
        data = ReportData([run])
        assert data.calibrations == []
        assert "calibration.json" in data.problems[0][1]
