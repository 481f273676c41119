import pytest

from sparsesam.experiment import DemoResult
from sparsesam.experiment.demo_summary import summarize


def result(optimizer, seed, seconds, accuracy, sparsity=None):
    return DemoResult(optimizer, seed, sparsity, losses=[1.0], seconds=seconds, test_accuracy=accuracy)


def test_averages_accuracy_and_adds_up_time_over_seeds():
    rows = summarize(
        [
            result("SGD", 0, [1.0, 10.0], 0.5),
            result("SAM", 0, [2.0, 20.0], 0.8, 0.0),
            result("SGD", 1, [1.0, 1.0], 0.7),
            result("SAM", 1, [2.0, 2.0], 0.9, 0.0),
        ]
    )
    assert [row.optimizer for row in rows] == ["SGD", "SAM"]
    assert rows[0].relative_time == 1
    assert rows[1].relative_time == 2
    assert rows[1].accuracy == pytest.approx(0.85)
    assert rows[1].spread == pytest.approx(0.1 / 2**0.5)
    assert rows[1].sparsity == 0.0


def test_one_seed_has_no_spread():
    assert summarize([result("SGD", 0, [1.0], 0.5)])[0].spread is None


def test_needs_the_reference():
    with pytest.raises(ValueError, match="reference must be one of the optimizers run"):
        summarize([result("SAM", 0, [1.0], 0.5)])
