import pytest

from sparsesam.lab.report.cost import cost_of, recommend
from sparsesam.lab.report.read_run import RunRecord
from sparsesam.lab.report.variants import group_runs
from tests.lab.report.made_runs import write_run


def recommended(tmp_path, **accuracies):
    """Of the optimizers with these accuracies, one for each seed."""
    paths = [
        write_run(tmp_path / f"{name}{seed}", optimizer=name.replace("_", "-"), seed=seed, accuracy=accuracy)
        for name, values in accuracies.items()
        for seed, accuracy in enumerate(values)
    ]
    (task,) = group_runs([RunRecord(path) for path in paths])
    return recommend(task, cost_of(task))


def test_the_most_accurate_is_chosen_if_nothing_cheaper_comes_close(tmp_path):
    found = recommended(tmp_path, sgd=[0.80, 0.81], sam=[0.90, 0.92])
    assert found.chosen is found.best
    assert found.sentence == (
        "Best choice: SAM, 91.0 ± 1.4 % at 2.00 × SGD’s passes. It has the highest mean accuracy."
    )


def test_the_cheapest_that_the_seeds_cannot_tell_from_the_best_is_chosen(tmp_path):
    found = recommended(tmp_path, sgd=[0.90, 0.92, 0.91], sam=[0.91, 0.92, 0.93])
    assert (found.chosen.label, found.best.label) == ("SGD", "SAM")
    assert "the difference is not significant" in found.sentence


def test_differences_are_taken_seed_by_seed(tmp_path):
    found = recommended(tmp_path, sgd=[0.80, 0.90, 0.85], sam=[0.81, 0.9101, 0.8599])
    assert found.chosen.label == "SAM"


def test_two_seeds_say_too_little_to_choose_the_cheaper_one(tmp_path):
    found = recommended(tmp_path, sgd=[0.9099, 0.91], sam=[0.90, 0.921])
    assert found.chosen.label == "SAM"


@pytest.mark.parametrize("accuracies", [{}, {"sam": [0.9, 0.91]}])
def test_a_single_variant_is_not_recommended(tmp_path, accuracies):
    if accuracies:
        assert recommended(tmp_path, **accuracies) is None
