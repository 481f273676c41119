from types import SimpleNamespace

import pytest

from sparsesam.lab.display import SeriesStyle
from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.experiment.variants import Variant, costs_of, mean_curve


class MadeRun(SimpleNamespace):
    def measured(self, name):
        return self.result.get(name)


def variant(optimizer, *results, epochs=3, failed=0):
    """A variant with a finished run for each result, and failed runs."""
    runs = [MadeRun(seed=seed, status="finished", result=result) for seed, result in enumerate(results)]
    runs += [MadeRun(seed=len(results) + seed, status="failed", result={}) for seed in range(failed)]
    return Variant(optimizer, TrainConfig(optimizer=optimizer, epochs=epochs), runs)


def costs(variants, seconds=None):
    """Costs by label; ``seconds`` per epoch, by optimizer, are those of a calibration."""
    calibration = SimpleNamespace(
        provenance={"cpu": "a chip"}, seconds_per_epoch=lambda config: (seconds or {}).get(config.optimizer)
    )
    found = costs_of(variants, [calibration] if seconds else [])
    return found, {variant.label: found.values[variant] for variant in variants}


def passes(count):
    return {"forward_backwards_per_step": count}


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


def test_times_not_measured_together_are_not_compared():
    found, values = costs([variant("sgd", passes(0.9)), variant("ssam-f", passes(1.7), passes(1.8), passes(1.9))])
    assert values == {"sgd": 1.0, "ssam-f": 2.0}
    assert (found.measure, found.reference) == ("passes", "sgd")
    assert "not in time" in found.explanation


def test_times_of_calibration_are_compared():
    variants = [variant("sgd", passes(1)), variant("sam", passes(2))]
    found, values = costs(variants, {"sgd": 2.0, "sam": 3.5})
    assert values == {"sgd": 1.0, "sam": 1.75}
    assert found.show(variants[1]) == "1.75 × sgd’s time"
    assert "measured together, interleaved on a chip" in found.explanation


def test_longer_run_costs_more():
    variants = [variant("sgd", passes(1)), variant("sam", passes(2), epochs=6)]
    assert costs(variants)[1] == {"sgd": 1.0, "sam": 4.0}
    assert costs(variants, {"sgd": 2.0, "sam": 2.0})[1] == {"sgd": 1.0, "sam": 2.0}


def test_calibration_that_lacks_a_finished_variant_is_not_mixed_with_other_times():
    variants = [variant("sgd", passes(1)), variant("sam", passes(2)), variant("asam", passes(2))]
    assert costs(variants, {"sgd": 2.0, "sam": 3.5})[1] == {"sgd": 1.0, "sam": 2.0, "asam": 2.0}
    variants[2] = variant("asam", failed=1)
    assert costs(variants, {"sgd": 2.0, "sam": 3.5})[1] == {"sgd": 1.0, "sam": 1.75, "asam": None}


def test_without_plain_variant_passes_are_those_of_a_plain_step():
    found, values = costs([variant("sam", passes(2))], {"sam": 3.5})
    assert (found.measure, found.reference, values) == ("passes", "a plain step", {"sam": 2})
