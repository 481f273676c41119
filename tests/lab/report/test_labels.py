import json

from benchmarks.report import write_run

from sparsesam.lab.report.labels import differing_settings
from sparsesam.lab.report.tasks import ReportData


def tasks_of(*paths):
    return ReportData(paths).tasks


def variants_of(*paths):
    (task,) = tasks_of(*paths)
    return task.variants


def test_identical_runs_count_once_preferring_finished_one(tmp_path):
    (sam,) = variants_of(
        write_run(tmp_path / "a", optimizer="sam", failure="it broke"),
        write_run(tmp_path / "b", optimizer="sam", accuracy=0.9),
        write_run(tmp_path / "c", optimizer="sam", accuracy=0.9),
    )
    assert [run.path.name for run in sam.runs] == ["b"]
    assert [run.path.name for run in sam.duplicates] == ["a", "c"]


def test_labels_name_settings_that_differ_from_others_and_default(tmp_path):
    variants = variants_of(
        write_run(tmp_path / "a", optimizer="sgd", weight_decay=1e-4),
        write_run(tmp_path / "b", optimizer="ssam-f"),
        write_run(tmp_path / "c", optimizer="ssam-f", sparsity=0.9),
    )
    assert [variant.label for variant in variants] == ["SGD", "SSAM-F", "SSAM-F, sparsity 0.9"]
    assert len({variant.style for variant in variants}) == 3
    assert set(differing_settings([variant.config for variant in variants])) == {
        "optimizer",
        "sparsity",
        "weight_decay",
    }


def test_name_given_by_sweep_is_kept_unless_runs_have_different_ones(tmp_path):
    paths = [write_run(tmp_path / str(seed), optimizer="sam", seed=seed) for seed in range(2)]
    for path, name in zip(paths, ("careful", "careful"), strict=True):
        rename(path, name)
    assert [variant.label for variant in variants_of(*paths)] == ["careful"]
    rename(paths[1], "other")
    assert [variant.label for variant in variants_of(*paths)] == ["SAM"]


def rename(path, name):
    content = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(json.dumps({**content, "name": name}))


def test_settings_without_effect_on_result_make_no_difference(tmp_path):
    (sgd,) = variants_of(
        write_run(tmp_path / "a", optimizer="sgd", rho=0.1),
        write_run(tmp_path / "b", optimizer="sgd", rho=0.2),
    )
    assert (len(sgd.runs), len(sgd.duplicates)) == (1, 1)


def test_tasks_are_separate_and_named_without_defaults(tmp_path):
    tasks = tasks_of(
        write_run(tmp_path / "a", optimizer="sam"),
        write_run(tmp_path / "b", optimizer="sam", label_noise=0.4),
    )
    assert [task.label for task in tasks] == ["digits, small-cnn", "digits, small-cnn, label noise 0.4"]
    assert [variant.label for task in tasks for variant in task.variants] == ["SAM", "SAM"]


def test_runs_of_variant_are_distinguished_by_seed(tmp_path):
    (task,) = tasks_of(*(write_run(tmp_path / str(seed), optimizer="sam", seed=seed) for seed in range(2)))
    assert [task.label_of(run, task.runs) for run in task.runs] == ["SAM, seed 0", "SAM, seed 1"]
    assert task.label_of(task.runs[0], task.runs[:1]) == "SAM"


def test_order_of_variants_does_not_depend_on_directories(tmp_path):
    variants = variants_of(
        write_run(tmp_path / "a", optimizer="ssam-d", mask_epochs=10),
        write_run(tmp_path / "b", optimizer="ssam-d", mask_epochs=2),
        write_run(tmp_path / "c", optimizer="adam", failure="it broke"),
        write_run(tmp_path / "d", optimizer="sgd"),
    )
    assert [variant.label for variant in variants] == ["SGD", "Adam", "SSAM-D, mask epochs 2", "SSAM-D, mask epochs 10"]
