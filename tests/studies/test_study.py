"""The study's arithmetic."""

from __future__ import annotations

import math

import pytest
from studies.plan import Task, passes_with_fisher
from studies.statistics import Mean, paired, verdict

from sparsesam.lab.experiment.config import TrainConfig

CONTENT = {
    "data": "somewhere:digits",
    "settings": {"epochs": 4},
    "tune_seeds": [100, 101],
    "seeds": 2,
    "methods": ["SAM"],
    "then": ["late"],
}
METHODS = {
    "SAM": {"settings": {"optimizer": "sam"}, "tune": {"rho": [0.1, 0.2]}},
    "late": {"settings": {"optimizer": "sam"}, "start": 0.5, "epochs": 2, "tune": {"rho": [0.1]}},
}


def task():
    return Task("made-up", CONTENT, METHODS)


def record(value, seed, accuracy):
    settings = {"rho": value, "seed": seed}
    return {"task": "made-up", "method": "SAM", "stage": "tune", "settings": settings, "accuracy": accuracy}


def test_best_strength_has_highest_mean_over_tuning_seeds():
    records = [record(0.1, 100, 0.9), record(0.1, 101, 0.5), record(0.2, 100, 0.8), record(0.2, 101, 0.8)]
    assert task().best("SAM", records[:3]) is None
    assert task().best("SAM", records) == 0.2
    assert task().finals("SAM", records[:3]) == []
    finals = task().finals("SAM", records)
    assert [(job.settings["rho"], job.settings["seed"]) for job in finals] == [(0.2, 0), (0.2, 1)]


def test_tuning_never_uses_test_images():
    assert {job.settings["dataset"] for job in task().tuning("SAM")} == {"somewhere:digits_validation"}
    records = [record(value, seed, 0.5) for value in (0.1, 0.2) for seed in (100, 101)]
    assert {job.settings["dataset"] for job in task().finals("SAM", records)} == {"somewhere:digits_test"}


def test_longer_and_later_methods_are_relative_to_task():
    (job, _) = task().tuning("late")
    assert (job.settings["epochs"], job.settings["ascent_start"]) == (8, 4.0)


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({"optimizer": "sgd"}, 1),
        ({"optimizer": "sam"}, 2),
        ({"optimizer": "sam", "ascent": "extrapolation"}, 1),
        ({"optimizer": "sam", "ascent_fraction": 0.25}, 1.25),
        ({"optimizer": "sam", "ascent_every": 5}, 1.2),
        ({"optimizer": "sam", "ascent_start": 7.0, "epochs": 10}, 1.3),
        ({"optimizer": "ssam-f", "mask_epochs": 5, "epochs": 10, "fisher_samples": 128}, 2 + 2 * 128 / 10_000),
    ],
)
def test_passes(settings, passes):
    config = TrainConfig(**settings)
    assert passes_with_fisher(config, images=1000) == pytest.approx(passes)


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
        (0.2, 0.5, 1.0, "confirmed"),
        (0.8, 0.5, 1.0, "undecided"),
        (-2.0, 0.5, 1.0, "refuted"),
        (2.0, math.nan, None, "undecided"),
    ],
)
def test_verdicts(value, interval, within, expected):
    assert verdict(Mean(value, 0.1, interval, 5), within=within) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(2.0, "confirmed"), (-0.4, "confirmed"), (-0.8, "undecided"), (-2.0, "refuted")]
)
def test_verdicts_of_not_worse(value, expected):
    assert verdict(Mean(value, 0.1, 0.5, 5), within=1.0, one_sided=True) == expected
