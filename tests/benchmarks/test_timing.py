import itertools

import pytest
from benchmarks.timing import Timed, interleaved, ratios, show


def test_reference_runs_between_others_and_order_rotates():
    order = []
    cases = {name: lambda name=name: order.append(name) for name in "rab"}
    timed = interleaved(cases, "r", rounds=2, warmup=1)
    assert "".join(order) == "rarbr" + "rbrar" + "rarbr"
    assert {name: len(times) for name, times in timed.items()} == {"r": 6, "a": 2, "b": 2}


def test_case_is_compared_with_adjacent_references():
    durations = iter([1.0, 6.0, 3.0, 20.0, 7.0])  # r a r b r
    now = itertools.accumulate(x for seconds in durations for x in (0.0, seconds))
    cases = {name: lambda: None for name in "rab"}
    timed = interleaved(cases, "r", rounds=1, warmup=0, clock=lambda: next(now))
    assert timed["a"] == [Timed(6.0, 2.0)]
    assert timed["b"] == [Timed(20.0, 5.0)]


def test_ratios_are_taken_per_round():
    found = ratios({"SGD": [Timed(1, 1), Timed(100, 100)], "SAM": [Timed(2, 1), Timed(200, 100), Timed(4, 1)]})
    assert found["SGD"].median == 1
    assert str(found["SAM"]) == "2.000 (2.000 to 3.000)"
    assert str(found["SAM"].per(2)) == "1.000 (1.000 to 1.500)"


def test_table_is_markdown(capsys):
    show("| x", [("a", 1), ("long", 2.5)])
    assert capsys.readouterr().out == "|      | x   |\n|------|-----|\n| a    | 1   |\n| long | 2.5 |\n\n"


def test_unknown_reference_raises():
    with pytest.raises(ValueError, match="reference must be one of SAM, got 'SGD'"):
        interleaved({"SAM": lambda: None}, "SGD", rounds=1, warmup=0)
