import json

import pytest
from benchmarks.report import write_run

from sparsesam.lab.experiment.sweep import Sweep
from sparsesam.lab.report.read_run import RunRecord
from sparsesam.lab.report.tasks import ReportData
from tests.lab.report.made_runs import write_calibration


def test_times_that_sweep_measured_are_compared(tmp_path):
    runs = [write_run(tmp_path / name, optimizer=name, seed=3) for name in ("sgd", "sam")]
    write_calibration(tmp_path, runs, [2.0, 3.5])
    data = ReportData(runs)
    (task,) = data.tasks
    assert (len(data.calibrations), data.problems) == (1, [])  # the file beside several runs is read once
    assert {variant.label: task.costs.values[variant] for variant in task.variants} == {"SGD": 1.0, "SAM": 1.75}


def verdict(tmp_path, accuracies, seeds=None):
    """Of optimizers with these accuracies, one per seed; ``seeds`` has an optimizer's first seed."""
    paths = [
        write_run(tmp_path / f"{name}{seed}", optimizer=name, seed=seed, accuracy=accuracy)
        for name, values in accuracies.items()
        for seed, accuracy in enumerate(values, start=(seeds or {}).get(name, 0))
    ]
    (task,) = ReportData(paths).tasks
    return task.verdict


BEST = {"sgd": [0.80, 0.81, 0.80], "sam": [0.90, 0.92, 0.91]}


@pytest.mark.parametrize(
    ("accuracies", "seeds", "chosen", "words"),
    [
        (BEST, {}, "SAM", "Best choice: SAM, 91.0 ± 2.5 % at 2.00 × SGD’s passes. It has the highest mean accuracy."),
        (
            {"sgd": [0.90, 0.92, 0.91], "sam": [0.91, 0.92, 0.93]},
            {},
            "SGD",
            "The highest mean is 92.0 ± 2.5 %, SAM at 2.00 × SGD’s passes; the difference is not significant.",
        ),
        ({"sgd": [0.80, 0.90, 0.85], "sam": [0.81, 0.9101, 0.8599]}, {}, "SAM", "It has the highest mean"),
        (BEST, {"sam": 10}, "SAM", "It has the highest mean"),
        ({**BEST, "asam": [0.99]}, {}, "SAM", "Not ranked, fewer than three seeds: ASAM."),
    ],
    ids=["most accurate", "cheapest not different from best", "paired by seed", "other seeds", "one with few seeds"],
)
def test_cheapest_that_does_not_differ_from_best_is_chosen(tmp_path, accuracies, seeds, chosen, words):
    found = verdict(tmp_path, accuracies, seeds)
    assert found.chosen.label == chosen
    assert words in found.sentence


def test_fewer_than_three_seeds_give_no_verdict(tmp_path):
    assert verdict(tmp_path / "one variant", {"sam": [0.90, 0.92]}) is None
    found = verdict(tmp_path, {"sgd": [0.80, 0.81], "sam": [0.90, 0.92]})
    assert found.chosen is None
    assert found.sentence.startswith("No ranking: it takes two variants with at least three finished seeds")


def test_cost_of_longer_runs_is_that_of_whole_run(tmp_path):
    runs = [
        write_run(tmp_path / "a", optimizer="sgd", epochs=2),
        write_run(tmp_path / "b", optimizer="sam", epochs=6),
    ]
    (task,) = ReportData(runs).tasks
    assert [task.costs.values[variant] for variant in task.variants] == [1.0, 6.0]


@pytest.mark.parametrize("data", [{"val_size": 5}, {"train_size": 9}, {"image_size": 32}, {"label_noise": 0.1}])
def test_runs_on_different_data_are_different_tasks(tmp_path, data):
    runs = [write_run(tmp_path / "a", optimizer="sgd"), write_run(tmp_path / "b", optimizer="sam", **data)]
    assert len(ReportData(runs).tasks) == 2


def test_variants_have_order_and_title_of_sweep(tmp_path):
    runs = [write_run(tmp_path / name, optimizer=name) for name in ("sam", "adam", "sgd")]
    data = ReportData(runs)
    assert (data.title, [variant.label for variant in data.tasks[0].variants]) == (
        "sparsesam report",
        ["SGD", "Adam", "SAM"],
    )
    Sweep("A title", {name: RunRecord(tmp_path / name).config for name in ("sam", "adam")}, [0]).write(tmp_path)
    data = ReportData(runs)
    assert (data.title, data.problems) == ("A title", [])
    assert [variant.label for variant in data.tasks[0].variants] == ["SAM", "Adam", "SGD"]
    Sweep("Another", {}, [0]).write(tmp_path / "other")
    write_run(tmp_path / "other" / "run")
    assert ReportData([tmp_path]).title == "sparsesam report"


def test_file_in_another_format_is_noted(tmp_path):
    run = write_run(tmp_path / "a")
    for content in ("{", json.dumps({"variants": 3})):
        for name in ("calibration.json", "sweep.json"):
            (tmp_path / name).write_text(content)
        data = ReportData([run])
        assert (data.calibrations, data.sweeps) == ([], [])
        assert ["calibration.json" in data.problems[0][1], "sweep.json" in data.problems[1][1]] == [True, True]
