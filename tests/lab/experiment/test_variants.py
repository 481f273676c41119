import math
from types import SimpleNamespace

import pytest
from scipy import stats

from sparsesam.lab.display import SeriesStyle
from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.experiment.variants import (
    Variant,
    confidence_interval,
    costs_of,
    differ,
    half_width,
    mean_curve,
    rank,
)


class MadeRun(SimpleNamespace):
    def measured(self, name):
        return self.result.get(name)


def variant(optimizer, *results, epochs=3, failed=0):
    """A variant with a finished run for each result, and failed runs."""
    runs = [MadeRun(seed=seed, status="finished", result=result) for seed, result in enumerate(results)]
    runs += [MadeRun(seed=len(results) + seed, status="failed", result={}) for seed in range(failed)]
    return Variant(optimizer, TrainConfig(optimizer=optimizer, epochs=epochs), runs)


def test_mean_and_interval_are_over_finished_seeds():
    sam = variant("sam", *({"test_accuracy": accuracy} for accuracy in (0.90, 0.91, 0.92)), failed=1)
    assert sam.accuracy == pytest.approx(0.91)
    assert (sam.accuracy_text, sam.seeds) == ("91.0 ± 2.5 %", "3 of 4, 1 failed")
    assert sam.accuracies == {0: 0.90, 1: 0.91, 2: 0.92}
    assert variant("sam", {"test_accuracy": 0.5}, {"test_accuracy": 0.7}).accuracy_text == "60.0 %"
    assert variant("sam", failed=1).accuracy is None


def test_curve_is_mean_at_each_epoch_with_interval_from_three_runs_on():
    curve = mean_curve(SeriesStyle(), "SAM", [{1: 50.0, 2: 90.0}, {1: 52.0}, {1: 54.0}], highest=100.0)
    assert (list(curve.x), list(curve.y)) == ([1, 2], [52.0, 90.0])
    assert curve.bars == [pytest.approx((52 - 4.968276, 52 + 4.968276)), None]
    assert mean_curve(SeriesStyle(), "SAM", [{1: 50.0}]).bars is None


def passes(optimizer, *counts, epochs=3):
    return variant(optimizer, *({"forward_backwards_per_step": count} for count in counts), epochs=epochs)


SGD, SAM, FAILED = passes("sgd", 1), passes("sam", 2), variant("asam", failed=1)


@pytest.mark.parametrize(
    ("variants", "seconds", "measure", "expected"),
    [
        ([passes("sgd", 0.9), passes("ssam-f", 1.7, 1.8, 1.9)], {}, "passes", [1.0, 2.0]),
        ([SGD, SAM], {"sgd": 2.0, "sam": 3.5}, "time", [1.0, 1.75]),
        ([SGD, passes("sam", 2, epochs=6)], {}, "passes", [1.0, 4.0]),
        ([SGD, passes("sam", 2, epochs=6)], {"sgd": 2.0, "sam": 2.0}, "time", [1.0, 2.0]),
        ([SGD, SAM, passes("asam", 2)], {"sgd": 2.0, "sam": 3.5}, "passes", [1.0, 2.0, 2.0]),
        ([SGD, SAM, FAILED], {"sgd": 2.0, "sam": 3.5}, "time", [1.0, 1.75, None]),
        ([SAM], {"sam": 3.5}, "passes", [2]),
    ],
    ids=["not timed", "timed", "longer", "longer, timed", "one not timed", "failed one not timed", "none plain"],
)
def test_cost_is_time_if_all_finished_variants_were_measured_together(variants, seconds, measure, expected):
    calibration = SimpleNamespace(
        provenance={"cpu": "a chip"}, seconds_per_epoch=lambda config: seconds.get(config.optimizer)
    )
    found = costs_of(variants, [calibration] if seconds else [])
    assert [found.values[one] for one in variants] == expected
    reference = "sgd" if SGD.label == variants[0].label else "a plain run"
    assert (found.measure, found.reference) == (measure, reference)
    assert ("measured together, interleaved on a chip" in found.explanation) == (measure == "time")
    assert found.show(variants[0]) == f"{expected[0]:.2f} × {reference}’s {measure}"


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
