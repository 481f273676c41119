import pytest
from benchmarks.timing import format_ratios, interleaved, ratios


def test_every_round_runs_every_case_and_the_first_one_moves_on():
    order = []
    cases = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = interleaved(cases, rounds=2, warmup=1)
    assert "".join(order) == "abc" + "bca" + "cab"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2, "c": 2}


def test_ratios_are_taken_round_by_round():
    slow_round = {"SGD": [1.0, 100.0, 1.0], "SAM": [2.0, 200.0, 2.0]}
    sgd, sam = ratios(slow_round, "SGD")
    assert sgd.median == 1
    assert (sam.low, sam.median, sam.high) == (2, 2, 2)
    assert "2.000" in format_ratios([sgd, sam], "SGD")


def test_refuses_an_unknown_reference():
    with pytest.raises(ValueError, match="reference must be one of SAM, got 'SGD'"):
        ratios({"SAM": [1.0]}, "SGD")
