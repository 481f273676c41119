"""The study's search and arithmetic."""

from __future__ import annotations

import itertools
import math

import pytest
from studies.parts import PARTS
from studies.plan import Task, best_first, read_task, task_names
from studies.report import Method, Results, fill, spread
from studies.statistics import Mean, paired, verdict

CONTENT = {
    "data": "somewhere:digits",
    "settings": {"lr": 0.1},
    "axes": {"epochs": [8, 15, 30, 60], "weight_decay": [0.1, 0.2, 0.3, 0.4]},
    "rounds": [{"draw": 6}, {"near": 3}, {"best": 2, "seeds": [101, 102]}],
    "seeds": 2,
    "methods": {"SGD": {}, "SAM": {"rho": [1, 2, 3, 4]}, "fixed": {"rho": 5}, "alike": {"like": "SAM"}},
}
METHODS = {name: {"settings": {"optimizer": "sam"}} for name in CONTENT["methods"]}


def task(**changes):
    return Task("made-up", {**CONTENT, **changes}, METHODS)


def accuracy(settings):
    """The best settings are 30 epochs, weight decay 0.2 and rho 2."""
    distance = abs(settings["epochs"] - 30) / 10 + 10 * abs(settings["weight_decay"] - 0.2)
    return 1 - 0.01 * (distance + abs(settings.get("rho", 2) - 2))


def searched(some, method="SAM"):
    """Returns the records of a whole search, and the plan that follows from them."""
    records = []
    while (plan := some.plan(method, records))[-1][0].stage == "tune":
        records += [{**job.identity, "accuracy": accuracy(job.settings)} for job in plan[-1]]
    return records, plan


def without(job, *names):
    return {name: value for name, value in job.settings.items() if name not in names}


def test_all_methods_try_the_same_epochs_and_weight_decays():
    sam, fixed = task().plan("SAM", []), task().plan("fixed", [])
    assert [without(job, "rho") for job in sam[0]] == [without(job, "rho") for job in fixed[0]]
    assert [len(sam), len(sam[0])] == [1, 6]
    assert len({str(job.settings) for job in task().plan("SGD", [])[0]}) == 6


def test_search_continues_near_the_best_and_repeats_the_best():
    records, (drawn, near, again, finals) = searched(task())
    assert [len(drawn), len(near), len(again), len(finals)] == [6, 3, 4, 2]
    best = max(drawn, key=lambda job: accuracy(job.settings)).settings
    axes = task().axes("SAM")
    for job in near:
        assert without(job) not in [without(other) for other in drawn]
        for name, values in axes.items():
            assert abs(values.index(job.settings[name]) - values.index(best[name])) <= 1
    top = sorted([*drawn, *near], key=lambda job: -accuracy(job.settings))[:2]
    for seed in (101, 102):
        found = [without(job, "seed") for job in again if job.settings["seed"] == seed]
        assert found == [without(job, "seed") for job in top]
    assert [without(job, "seed", "dataset") for job in finals] == [without(top[0], "seed", "dataset")] * 2
    assert task().plan("SAM", records[:-1])[-1] == again


def test_a_method_like_another_is_only_tested_with_its_settings():
    assert task().plan("alike", []) == [[]]
    records, (*_, finals) = searched(task())
    *search, tested = task().plan("alike", records)
    assert search == [[], [], []]
    assert [job.settings for job in tested] == [job.settings for job in finals]
    assert {job.method for job in tested} == {"alike"}


def test_halving_trains_fewer_settings_longer():
    rounds = [{"draw": 4, "epochs": 1}, {"best": 2, "epochs": 2}, {"best": 1, "epochs": 4}]
    _, plan = searched(task(rounds=rounds))
    assert [[job.settings["epochs"] for job in jobs] for jobs in plan[:3]] == [[1] * 4, [2] * 2, [4]]
    assert {job.settings["epochs"] for job in plan[3]} == {4}


def test_a_task_without_rounds_tests_the_given_settings():
    ((first, second),) = task(rounds=[], axes={}).plan("fixed", [])
    assert (first.stage, first.settings["rho"], second.settings["seed"]) == ("final", 5, 1)


def test_tuning_never_uses_test_images():
    _, plan = searched(task())
    assert {job.settings["dataset"] for jobs in plan[:-1] for job in jobs} == {"somewhere:digits_validation"}
    assert {job.settings["dataset"] for job in plan[-1]} == {"somewhere:digits_test"}


def test_of_equal_accuracies_fewer_epochs_are_best():
    trials = {(("epochs", 8),): {0: 0.5}, (("epochs", 4),): {0: 0.5}, (("epochs", 2),): {0: 0.4, 1: 0.4}}
    assert [dict(point)["epochs"] for point in best_first(trials)] == [2, 4, 8]


@pytest.mark.parametrize("name", task_names())
def test_tasks_can_be_run(name):
    some = read_task(name)
    for method in some.methods:
        for job in some.plan(method, [])[0]:
            assert job.config.content_hash
            assert job.part is None or job.part in PARTS


def made(stage, rho, seed, accuracy, passes=2.0):
    settings = {"epochs": 10, "weight_decay": 0.1, "rho": rho, "seed": seed, "dataset": stage}
    return {"method": "SAM", "stage": stage, "settings": settings, "accuracy": accuracy, "passes": passes}


def test_report_reads_the_tests_of_the_best_trial():
    tuned = [made("tune", 0.1, 100, 0.9), made("tune", 0.2, 100, 0.8), made("tune", 0.2, 101, 0.8)]
    method = Method([*tuned, made("final", 0.1, 0, 0.5), made("final", 0.2, 0, 0.7), made("final", 0.2, 1, 0.6)])
    assert method.accuracy == {0: 70, 1: 60}
    assert (method.cost, method.tuned) == (20, "epochs 10, weight decay 0.1, rho 0.2")
    assert method.best_by("rho") == "0.1: 90.0, 0.2: 80.0"


def test_report_leaves_out_a_method_whose_test_is_not_complete():
    records = [made("final", 0.1, seed, 0.5) for seed in range(5)]
    assert list(Results("joint-digits-30", records, {}).methods) == ["SAM"]
    assert not Results("joint-digits-30", records[:4], {}).methods


def test_report_fills_the_tables_of_a_page():
    page = "a\n<!-- one -->\nold\n<!-- end -->\nb\n<!-- two -->\n<!-- end -->"
    assert fill(page, "one", ["| x |"]) == page.replace("\nold\n", "\n\n| x |\n\n")


def test_points_of_nearly_equal_cost_are_drawn_side_by_side():
    costs = [8, 8, 8.1, 20, 80]
    places = spread(costs)
    assert min(b / a for a, b in itertools.pairwise(places)) == pytest.approx(10**0.024)
    assert places[1] == pytest.approx(8, rel=0.01)  # as little as possible
    assert places[3:] == pytest.approx([20, 80])


def test_mean_has_student_t_interval():
    mean = Mean.of([1.0, 2.0, 3.0, 4.0])
    assert (mean.value, mean.count) == (2.5, 4)
    assert mean.interval == pytest.approx(3.182446 * math.sqrt(5 / 3) / 2, rel=1e-6)


def test_comparisons_are_paired_by_seed():
    difference = paired({0: 1.0, 1: 2.0, 2: 9.0, 3: 3.0}, {0: 0.5, 1: 1.5, 3: 2.5, 7: 3.0})
    assert (difference.value, difference.count, difference.interval) == (0.5, 3, 0.0)


@pytest.mark.parametrize(
    ("value", "interval", "within", "expected"),
    [
        (1.0, 0.5, None, "confirmed"),
        (-1.0, 0.5, None, "refuted"),
        (1.0, 1.5, None, "undecided"),
        (2.0, math.nan, None, "undecided"),
        (0.2, 0.5, 1.0, "confirmed"),
        (0.8, 0.5, 1.0, "undecided"),
        (-2.0, 0.5, 1.0, "refuted"),
        (2.0, 0.5, 1.0, "refuted"),
    ],
)
def test_verdicts(value, interval, within, expected):
    assert verdict(Mean(value, interval, 5), within=within) == expected
