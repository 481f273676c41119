import pytest

from sparsesam.lab.report.read_run import read_run
from sparsesam.lab.report.variants import by_task, differing, group
from tests.lab.report.made_runs import write_run


def grouped(*paths):
    return group([read_run(path) for path in paths])


def test_seeds_of_one_config_are_one_variant(tmp_path):
    (sam,) = grouped(
        write_run(tmp_path / "a", optimizer="sam", seed=0, accuracy=0.5),
        write_run(tmp_path / "b", optimizer="sam", seed=1, accuracy=0.7),
        write_run(tmp_path / "c", optimizer="sam", seed=2, failure="it broke"),
    )
    assert (sam.label, len(sam.runs), len(sam.finished)) == ("SAM", 3, 2)
    assert sam.accuracy == pytest.approx(0.6)
    assert sam.spread("test_accuracy") == pytest.approx(0.2 / 2**0.5)


def test_one_seed_has_no_spread(tmp_path):
    (sam,) = grouped(write_run(tmp_path / "a", optimizer="sam"))
    assert sam.spread("test_accuracy") is None


def test_labels_name_what_differs_among_variants_of_one_optimizer(tmp_path):
    variants = grouped(
        write_run(tmp_path / "a", optimizer="sgd", weight_decay=1e-4),
        write_run(tmp_path / "b", optimizer="ssam-f", sparsity=0.5),
        write_run(tmp_path / "c", optimizer="ssam-f", sparsity=0.9),
    )
    assert [one.label for one in variants] == ["SGD", "SSAM-F, sparsity 0.5", "SSAM-F, sparsity 0.9"]
    assert [one.number for one in variants] == [0, 0, 1]
    assert set(differing(variants)) == {"optimizer", "sparsity", "weight_decay"}


def test_tasks_are_kept_apart(tmp_path):
    variants = grouped(
        write_run(tmp_path / "a", optimizer="sam", label_noise=0.2),
        write_run(tmp_path / "b", optimizer="sam", label_noise=0.4),
    )
    assert [one.label for one in variants] == ["SAM", "SAM"]
    assert list(by_task(variants)) == [
        "digits, small-cnn, label noise 0.2",
        "digits, small-cnn, label noise 0.4",
    ]


def test_time_is_relative_to_plain_steps_of_the_same_kind(tmp_path):
    variants = grouped(
        write_run(tmp_path / "a", optimizer="sgd", seconds=2.0),
        write_run(tmp_path / "b", optimizer="sam", seconds=4.0),
        write_run(tmp_path / "c", optimizer="sam", seconds=9.0, batch_size=8),
    )
    times = {one.label: one.relative_time for one in variants}
    assert times == {"SGD": 1.0, "SAM, batch size 64": 2.0, "SAM, batch size 8": None}


def test_times_of_two_machines_are_not_compared(tmp_path):
    sam = write_run(tmp_path / "b", optimizer="sam", seconds=4.0)
    text = (sam / "result.json").read_text()
    (sam / "result.json").write_text(text.replace("a chip", "another"))
    assert grouped(write_run(tmp_path / "a", optimizer="sgd"), sam)[1].relative_time is None


def test_runs_of_one_variant_are_told_apart_by_seed_or_directory(tmp_path):
    (sam,) = grouped(
        write_run(tmp_path / "a", optimizer="sam", seed=0),
        write_run(tmp_path / "b", optimizer="sam", seed=0),
        write_run(tmp_path / "c", optimizer="sam", seed=1),
    )
    assert [sam.name_of(run, sam.runs) for run in sam.runs] == ["SAM, a", "SAM, b", "SAM, seed 1"]
    assert sam.name_of(sam.runs[0], sam.runs[:1]) == "SAM"


def test_variants_are_in_order_whatever_their_directories_are_called(tmp_path):
    variants = grouped(
        write_run(tmp_path / "a", optimizer="ssam-d", mask_epochs=10),
        write_run(tmp_path / "b", optimizer="ssam-d", mask_epochs=2),
        write_run(tmp_path / "c", optimizer="adam", failure="it broke"),
        write_run(tmp_path / "d", optimizer="sgd"),
    )
    assert [one.label for one in variants] == ["SGD", "SSAM-D, mask epochs 2", "SSAM-D, mask epochs 10", "Adam"]
