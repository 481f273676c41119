import itertools

import pytest
from benchmarks.timing import compare, show


def test_reference_runs_between_others_and_order_rotates():
    order = []
    cases = {name: lambda name=name: order.append(name) for name in "rab"}
    assert list(compare(cases, "r", rounds=2, warmup=1)) == list(cases)
    assert "".join(order) == "rarbr" + "rbrar" + "rarbr"


def test_case_is_compared_with_adjacent_references():
    durations = iter([9.0, 9.0, 9.0, 9.0, 9.0, 1.0, 20.0, 7.0, 10.0, 3.0])  # r a r b r, then r b r a r
    now = itertools.accumulate(x for seconds in durations for x in (0.0, seconds))
    found = compare(dict.fromkeys("rab", lambda: None), "r", rounds=1, warmup=1, clock=lambda: next(now))
    assert (found["r"].seconds, found["a"].seconds, found["b"].seconds) == (3.0, 10.0, 20.0)
    assert (found["r"].median, found["a"].median, found["b"].median) == (1.0, 2.0, 5.0)


def test_quartiles_are_of_ratios_in_each_round():
    durations = iter([1.0, 2.0, 1.0, 100.0, 200.0, 100.0, 1.0, 4.0, 1.0])
    now = itertools.accumulate(x for seconds in durations for x in (0.0, seconds))
    found = compare(dict.fromkeys("ra", lambda: None), "r", rounds=3, warmup=0, clock=lambda: next(now))["a"]
    assert str(found) == "2.000 (2.000 to 3.000)"
    assert str(found.per(2)) == "1.000 (1.000 to 1.500)"


def test_table_is_markdown(capsys):
    show("| x", [("a", 1), ("long", 2.5)])
    assert capsys.readouterr().out == "|      | x   |\n|------|-----|\n| a    | 1   |\n| long | 2.5 |\n\n"


def test_no_rounds_raise():
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        compare({"SAM": lambda: None}, "SAM", rounds=0, warmup=0)
