import math

import pytest

from sparsesam.lab.experiment.confidence import confidence_interval, differ, half_width


def test_half_width_matches_student_t():
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.302653 / math.sqrt(3))
    assert half_width([0.0, 1.0] * 100) == pytest.approx(1.971957 * math.sqrt(50 / 199 / 200))
    assert half_width([1.0]) is None


def test_interval_of_accuracy_stays_between_0_and_1():
    assert confidence_interval([0.97, 0.99], lowest=0.0, highest=1.0) == (pytest.approx(0.98 - 12.7062 * 0.01), 1.0)
    assert confidence_interval([2.0, 4.0]) == (pytest.approx(3 - 12.7062), pytest.approx(3 + 12.7062))
    assert confidence_interval([0.5], lowest=0.0, highest=1.0) is None


def test_differences_are_paired_by_seed():
    first, second = {0: 0.5, 1: 0.7, 2: 0.9}, {0: 0.51, 1: 0.71, 2: 0.912}
    assert differ(first, second)  # the same small difference for each seed
    assert not differ(first, {0: 0.7, 1: 0.5, 2: 0.95})
    assert differ({0: 0.5}, {0: 0.7}) is None
    assert differ({0: 0.5, 1: 0.6}, {2: 0.7, 3: 0.8}) is None
