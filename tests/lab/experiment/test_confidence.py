import math

import pytest
from scipy import stats

from sparsesam.lab.experiment.confidence import confidence_interval, differ, half_width, rank


def test_half_width_matches_student_t():
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.302653 / math.sqrt(3))
    assert half_width([0.0, 1.0] * 100) == pytest.approx(1.971957 * math.sqrt(50 / 199 / 200))


def test_interval_takes_three_seeds_and_stays_between_0_and_1():
    assert half_width([1.0, 2.0]) is None
    assert confidence_interval([0.5], 1.0) is None
    low, high = confidence_interval([0.97, 0.98, 0.99], 1.0)
    assert (low, high) == (pytest.approx(0.98 - 4.302653 * 0.01 / math.sqrt(3)), 1.0)


def test_differences_are_paired_by_seed():
    first, second = {0: 0.5, 1: 0.7, 2: 0.9}, {0: 0.51, 1: 0.71, 2: 0.912}
    assert differ(first, second)  # the same small difference for each seed
    assert not differ(first, {0: 0.7, 1: 0.5, 2: 0.95})
    assert differ({0: 0.5}, {0: 0.7}) is None
    assert differ({0: 0.5, 1: 0.6}, {0: 0.7, 1: 0.8}) is None


@pytest.mark.parametrize("shift", [0.02, 0.03, 0.04, 0.06])
def test_other_seeds_are_compared_by_welchs_test(shift):
    first, second = [0.50, 0.52, 0.51, 0.53], [0.50 + shift, 0.55 + shift, 0.51 + shift]
    expected = stats.ttest_ind(first, second, equal_var=False).pvalue < 0.05
    assert differ(dict(enumerate(first)), dict(enumerate(second, start=10))) == expected


def test_equal_values_of_other_seeds_do_not_differ():
    same = dict.fromkeys(range(3), 0.5)
    assert differ(same, dict.fromkeys(range(3, 6), 0.5)) is False
    assert differ(same, dict.fromkeys(range(3, 6), 0.6)) is True


def test_ranking_names_best_and_those_alike():
    values = {
        "worse": {0: 0.1, 1: 0.2, 2: 0.3},
        "alike": {0: 0.7, 1: 0.5, 2: 0.95},
        "best": {0: 0.51, 1: 0.77, 2: 0.912},
        "two seeds": {0: 0.99, 1: 0.99},
    }
    assert rank(values) == ["best", "alike"]
    assert rank(values, highest=False)[0] == "worse"
    assert rank({name: values[name] for name in ("best", "two seeds")}) == []
