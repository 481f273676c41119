import json

import pytest
from benchmarks.report import write_run

from sparsesam.lab.experiment.sweep import Sweep
from sparsesam.lab.report.read_run import RunRecord
from sparsesam.lab.report.tasks import ReportData, label_of
from tests.lab.report.made_runs import write_calibration


def test_times_that_sweep_measured_are_compared(tmp_path):
    runs = [write_run(tmp_path / name, optimizer=name, seed=3) for name in ("sgd", "sam")]
    write_calibration(tmp_path, runs, [2.0, 3.5])
    data = ReportData(runs)
    (task,) = data.tasks
    assert (len(data.calibrations), data.problems) == (1, [])  # the file beside several runs is read once
    assert {variant.label: task.costs.values[variant] for variant in task.variants} == {"SGD": 1.0, "SAM": 1.75}


def tasks_of(*paths):
    return ReportData(paths).tasks


def variants_of(*paths):
    (task,) = tasks_of(*paths)
    return task.variants


def verdict(tmp_path, **accuracies):
    """Of optimizers with these accuracies, one per seed."""
    (task,) = tasks_of(
        *(
            write_run(tmp_path / f"{name}{seed}", optimizer=name, seed=seed, accuracy=accuracy)
            for name, values in accuracies.items()
            for seed, accuracy in enumerate(values)
        )
    )
    return task.verdict


BEST = {"sgd": [0.80, 0.81, 0.80], "sam": [0.90, 0.92, 0.91]}


@pytest.mark.parametrize(
    ("accuracies", "chosen", "words"),
    [
        (BEST, "SAM", "Best choice: SAM, 91.0 ± 2.5 % at 2.00 × SGD’s passes. It has the highest mean accuracy."),
        (
            {"sgd": [0.90, 0.92, 0.91], "sam": [0.91, 0.92, 0.93]},
            "SGD",
            "The highest mean is 92.0 ± 2.5 %, SAM at 2.00 × SGD’s passes; the difference is not significant.",
        ),
        ({**BEST, "asam": [0.99]}, "SAM", "Not ranked, fewer than three seeds: ASAM."),
    ],
    ids=["most accurate", "cheapest not different from best", "one with few seeds"],
)
def test_cheapest_that_does_not_differ_from_best_is_chosen(tmp_path, accuracies, chosen, words):
    sentence, found = verdict(tmp_path, **accuracies)
    assert found.label == chosen
    assert words in sentence


def test_fewer_than_three_seeds_give_no_verdict(tmp_path):
    assert verdict(tmp_path / "one variant", sam=[0.90, 0.92]) == ("", None)
    sentence, chosen = verdict(tmp_path, sgd=[0.80, 0.81], sam=[0.90, 0.92])
    assert chosen is None
    assert sentence.startswith("No ranking: it takes two variants with at least three finished seeds")


def test_variants_have_order_and_title_of_sweep(tmp_path):
    runs = [write_run(tmp_path / name, optimizer=name) for name in ("sam", "adam", "sgd")]
    data = ReportData(runs)
    assert data.title == "sparsesam report"
    assert [variant.label for variant in data.tasks[0].variants] == ["SGD", "Adam", "SAM"]
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


def test_identical_runs_count_once_preferring_finished_one(tmp_path):
    (sam,) = variants_of(
        write_run(tmp_path / "a", optimizer="sam", failure="it broke"),
        write_run(tmp_path / "b", optimizer="sam", accuracy=0.9, eta=0.3),  # which it does not use
        write_run(tmp_path / "c", optimizer="sam", accuracy=0.9),
    )
    assert [run.path.name for run in sam.runs] == ["b"]


def test_labels_name_settings_that_differ_from_others_and_default(tmp_path):
    variants = variants_of(
        write_run(tmp_path / "a", optimizer="sgd", weight_decay=1e-4),
        write_run(tmp_path / "b", optimizer="ssam-f"),
        write_run(tmp_path / "c", optimizer="ssam-f", sparsity=0.9),
    )
    assert [variant.label for variant in variants] == ["SGD", "SSAM-F", "SSAM-F, sparsity 0.9"]
    assert len({variant.style for variant in variants}) == 3


def test_name_given_by_sweep_is_kept_unless_runs_have_different_ones(tmp_path):
    paths = [write_run(tmp_path / str(seed), optimizer="sam", seed=seed) for seed in range(2)]
    for path in paths:
        rename(path, "careful")
    assert [variant.label for variant in variants_of(*paths)] == ["careful"]
    rename(paths[1], "other")
    assert [variant.label for variant in variants_of(*paths)] == ["SAM"]


def rename(path, name):
    content = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(json.dumps({**content, "name": name}))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"val_size": 5}, "val size 5"),
        ({"train_size": 9}, "train size 9"),
        ({"image_size": 32}, "image size 32"),
        ({"label_noise": 0.4}, "label noise 0.4"),
    ],
)
def test_runs_on_different_data_are_different_tasks_named_without_defaults(tmp_path, data, words):
    tasks = tasks_of(write_run(tmp_path / "a", optimizer="sam"), write_run(tmp_path / "b", optimizer="sam", **data))
    assert [task.label for task in tasks] == ["digits, small-cnn", f"digits, small-cnn, {words}"]
    assert [variant.label for task in tasks for variant in task.variants] == ["SAM", "SAM"]


def test_runs_of_variant_are_distinguished_by_seed(tmp_path):
    (sam,) = variants_of(*(write_run(tmp_path / str(seed), optimizer="sam", seed=seed) for seed in range(2)))
    assert [label_of(sam, run, sam.runs) for run in sam.runs] == ["SAM, seed 0", "SAM, seed 1"]
    assert label_of(sam, sam.runs[0], sam.runs[:1]) == "SAM"
