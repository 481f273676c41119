import math

import pytest

from sparsesam.lab.experiment.interval import _STUDENT, differ, half_width


def test_the_half_width_is_student_s():
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3))
    assert half_width([1.0]) is None


def test_quantiles_are_those_of_student_s_t():
    stats = pytest.importorskip("scipy.stats")
    for freedom, quantile in enumerate(_STUDENT, start=1):
        assert quantile == pytest.approx(stats.t.ppf(0.975, freedom), abs=6e-4)
    for count in (32, 60, 200):
        values = [float(place % 2) for place in range(count)]
        spread = math.sqrt(0.25 * count / (count - 1))
        expected = stats.t.ppf(0.975, count - 1) * spread / math.sqrt(count)
        assert half_width(values) == pytest.approx(expected, rel=1e-3)


def test_differences_are_taken_seed_by_seed():
    first, second = {0: 0.5, 1: 0.7, 2: 0.9}, {0: 0.51, 1: 0.71, 2: 0.912}
    assert differ(first, second)  # the same small difference for each seed
    assert not differ(first, {0: 0.7, 1: 0.5, 2: 0.95})
    assert differ({0: 0.5}, {0: 0.7}) is None
    assert differ({0: 0.5, 1: 0.6}, {2: 0.7, 3: 0.8}) is None
