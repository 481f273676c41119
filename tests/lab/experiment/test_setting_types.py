from typing import Literal

import pytest

from sparsesam.lab.experiment import setting_types
from sparsesam.lab.experiment.setting_types import convert


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, float, 1.0),
        ("1e-3", float, 0.001),  # text in YAML
        (None, int | None, None),
        ([0.9, 1], tuple[float, float], (0.9, 1.0)),
        (True, bool | Literal["all"], True),
        ("all", bool | Literal["all"], "all"),
    ],
)
def test_values_are_converted_to_type_of_setting(value, hint, expected):
    found = convert("name", value, hint)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint", "rule"),
    [
        ("samm", Literal["sgd", "sam"], "one of 'sgd', 'sam', got 'samm'"),
        (3.5, int, "a whole number, got 3.5"),
        (True, int, "a whole number, got True"),
        ("many", int | None, "a whole number or null, got 'many'"),
        ("fast", float, "a number, got 'fast'"),
        (1, bool, "true or false, got 1"),
        ([0.9], tuple[float, float], r"a list of 2 numbers, got \[0.9\]"),
        (0, setting_types.PositiveInt, "at least 1, got 0"),
        (-1.0, setting_types.NonNegativeFloat, "at least 0, got -1.0"),
        (1.5, setting_types.Fraction, r"in \[0, 1\], got 1.5"),
        (1.0, setting_types.FractionBelow1 | None, r"in \[0, 1\), or null, got 1.0"),
        (0.0, setting_types.FractionAbove0, r"in \(0, 1\], got 0.0"),
    ],
)
def test_invalid_values_are_rejected_with_rule(value, hint, rule):
    with pytest.raises(ValueError, match=f"name must be {rule}"):
        convert("name", value, hint)
